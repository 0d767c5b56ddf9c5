// The record of one graph: what the page was written with, and the flows that follow from it.

const MEAN = -1; // in place of a head: the mean over all of them

class Record {
  constructor(content) {
    Object.assign(this, content); // title, facts, labels, positions, edges, molecule, layers
    this.n = this.labels.length;
    this.neighbours = Array.from({ length: this.n }, () => []); // either way along an edge
    for (const [a, b] of this.edges) {
      this.neighbours[a].push(b);
      this.neighbours[b].push(a);
    }
    const { row, column, weight } = this.adjacency; // Ã_ij at row i, column j
    const weights = new Float32Array(decode(weight));
    this.near = Array.from({ length: this.n }, () => []);
    row.forEach((i, entry) => this.near[i].push([column[entry], weights[entry]]));
    this.opened = new Map(); // the heads of one layer that were asked for
  }

  /** Queries and keys of a head, [n, width] each, decoded when they are first asked for. */
  head(layer, head) {
    const name = `layer-${layer}-head-${head}`;
    if (!this.opened.has(name)) {
      if (this.openedLayer !== layer) this.opened.clear();
      this.openedLayer = layer;
      const bytes = decode(document.getElementById(name).textContent);
      const size = this.n * this.layers[layer].width;
      const parts = [0, 1, 2, 3].map((part) => new Float32Array(bytes, part * size * 4, size));
      this.opened.set(name, parts);
    }
    return this.opened.get(name);
  }

  /** Scores of one query: s = q·k · scale and u = q̃·k̃ · scale, [n] each. */
  scores(layer, head, query) {
    const [q, k, qFriction, kFriction] = this.head(layer, head);
    const { width, scale } = this.layers[layer];
    return [products(q, k, query, width, scale), products(qFriction, kFriction, query, width, scale)];
  }

  /**
   * The flows of one query, in one head or their mean, at λ = lam.
   * With `adjacent` they are what the layer mixes values by, (Ã + γZ)/(1 + γ), and what Ã reaches counts as active.
   */
  flows({ layer, head, query, lam, adjacent }) {
    const { alpha, scaling, gamma, heads } = this.layers[layer];
    const problem = { lam, alpha: alpha ?? Infinity, scaling };
    const chosen = head === MEAN ? Array.from({ length: heads }, (_, each) => each) : [head];
    const flows = new Float64Array(this.n);
    const active = new Uint8Array(this.n);
    for (const each of chosen) {
      const solved = solveFlows(...this.scores(layer, each, query), problem);
      for (let j = 0; j < this.n; j++) {
        flows[j] += solved.flows[j] / chosen.length;
        active[j] |= solved.active[j];
      }
    }
    if (adjacent && gamma !== null) {
      for (let j = 0; j < this.n; j++) flows[j] *= gamma / (1 + gamma);
      for (const [j, weight] of this.near[query]) {
        flows[j] += weight / (1 + gamma);
        active[j] = 1;
      }
    }
    return { flows, active };
  }

  /** Edges between the query and every node, whichever way they point; Infinity where there is no path. */
  hops(query) {
    const hops = new Array(this.n).fill(Infinity);
    hops[query] = 0;
    let reached = [query];
    for (let hop = 1; reached.length; hop++) {
      reached = reached.flatMap((node) => this.neighbours[node]).filter((node) => {
        if (hops[node] <= hop) return false;
        hops[node] = hop;
        return true;
      });
    }
    return hops;
  }
}

function products(queries, keys, query, width, scale) {
  const out = new Float64Array(keys.length / width);
  const start = query * width;
  for (let j = 0, at = 0; j < out.length; j++) {
    let sum = 0;
    for (let c = 0; c < width; c++, at++) sum += queries[start + c] * keys[at];
    out[j] = sum * scale;
  }
  return out;
}

/** The bytes of a base64 text. */
function decode(text) {
  const characters = atob(text);
  const bytes = new Uint8Array(characters.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = characters.charCodeAt(i);
  return bytes.buffer;
}

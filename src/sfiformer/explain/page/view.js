// The drawing: edges or bonds, the flows into the query, the nodes. Lengths are in units of the drawing, in which
// neighbouring nodes are SPACING apart; widths of flows are in pixels at any zoom.

const SPACING = 40;
const HAIRLINE = 0.6; // pixels: no flow is drawn thinner, however small

class View {
  constructor(svg, record) {
    this.svg = svg;
    this.record = record;
    this.places = spread(record.positions);
    this.radius = SPACING * (record.molecule ? 0.28 : 0.3);
    this.home = frame(this.places, this.radius * 3);
    svg.append(
      this.drawEdges(),
      (this.links = shape("g", { class: "links" })),
      (this.discs = shape("g", { class: "nodes" })),
      (this.pointer = shape("circle", { class: "pointed", r: this.radius * 1.5, visibility: "hidden" })),
    );
    this.nodes = this.places.map(([x, y], node) => this.drawNode(node, x, y));
    this.discs.append(...this.nodes);
    this.zoomTo(this.home);
  }

  /** All edges as one path; of a molecule, as many lines as the bond has. */
  drawEdges() {
    const lines = this.record.edges.flatMap(([a, b, order]) => this.bond(this.places[a], this.places[b], order));
    const kind = this.record.molecule ? "bonds" : "edges";
    const path = shape("path", { class: kind, d: lines.map(({ d }) => d).join("") });
    const dashed = shape("path", { class: `${kind} aromatic`, d: lines.map(({ dashes }) => dashes ?? "").join("") });
    const group = shape("g", {});
    group.append(path, dashed);
    // A crowd of edges would hide the flows: the more there are, the fainter they are.
    if (!this.record.molecule) group.style.opacity = Math.min(1, 0.12 + 150 / this.record.edges.length);
    return group;
  }

  bond([ax, ay], [bx, by], order) {
    const length = Math.hypot(bx - ax, by - ay) || 1;
    const [nx, ny] = [(-(by - ay) / length) * 2.6, ((bx - ax) / length) * 2.6];
    const line = (side) => `M${ax + side * nx} ${ay + side * ny}L${bx + side * nx} ${by + side * ny}`;
    if (order === 1.5) return [{ d: line(-0.8), dashes: line(0.8) }];
    const sides = { 2: [-0.8, 0.8], 3: [-1.6, 0, 1.6] }[order] ?? [0];
    return sides.map((side) => ({ d: line(side) }));
  }

  drawNode(node, x, y) {
    const group = shape("g", { class: "node", "data-node": node, transform: `translate(${x} ${y})` });
    group.append(shape("circle", { r: this.radius }));
    const symbol = this.record.molecule?.[node];
    if (symbol) {
      const size = this.radius * Math.max(0.5, 1.31 - 0.16 * symbol.length); // all of it within the disc
      const text = shape("text", { "font-size": size, dy: "0.36em" });
      text.textContent = symbol;
      group.append(text);
      group.classList.add("named");
    }
    return group;
  }

  /** Show where the query's unit comes from. */
  show(query, flows, active) {
    this.nodes.forEach((group, node) => {
      const share = active[node] ? logShare(flows[node]) : 0;
      group.classList.toggle("zero", !active[node]);
      group.classList.toggle("query", node === query);
      group.classList.toggle("bright", share > 0.6);
      group.firstChild.style.fill = active[node] ? colour(flows[node]) : "";
      group.firstChild.setAttribute("r", this.radius * this.size(node, active[node], share));
    });
    this.discs.append(this.nodes[query]); // on top

    const sources = [...flows.keys()].filter((node) => active[node] && node !== query);
    sources.sort((a, b) => flows[a] - flows[b]); // the largest on top
    const unit = Math.min(60, Math.max(20, this.svg.clientWidth / 15)); // pixels: all flows side by side
    while (this.links.childElementCount < sources.length) this.links.append(shape("path", {}));
    [...this.links.children].forEach((path, place) => {
      const node = sources[place];
      path.style.display = node === undefined ? "none" : "";
      if (node === undefined) return;
      path.setAttribute("d", curve(this.places[node], this.places[query]));
      path.dataset.node = node;
      path.style.stroke = colour(flows[node]);
      path.style.strokeWidth = Math.max(HAIRLINE, unit * flows[node]);
      path.style.strokeOpacity = 0.15 + 0.65 * logShare(flows[node]);
    });
  }

  /** Of a node's disc: small flows stay in the background, but names need their room. */
  size(node, active, share) {
    if (this.record.molecule?.[node]) return active ? 1 : 0.85;
    return active ? 0.45 + 0.65 * share : 0.5;
  }

  /** Ring a node, or none. */
  point(node) {
    this.pointer.setAttribute("visibility", node === null ? "hidden" : "visible");
    if (node === null) return;
    this.pointer.setAttribute("cx", this.places[node][0]);
    this.pointer.setAttribute("cy", this.places[node][1]);
  }

  /** The node nearest to a place on the screen, or null if none is within `reach` pixels. */
  nodeAt(clientX, clientY, reach = 24) {
    const matrix = this.svg.getScreenCTM();
    const { x, y } = new DOMPoint(clientX, clientY).matrixTransform(matrix.inverse());
    const far = this.places.map(([px, py]) => Math.hypot(px - x, py - y));
    const nearest = far.indexOf(Math.min(...far));
    return far[nearest] * matrix.a <= Math.max(reach, this.radius * matrix.a) ? nearest : null;
  }

  /** The node nearest to the middle of the drawing. */
  middle() {
    const [x, y, width, height] = this.home;
    const far = this.places.map(([px, py]) => Math.hypot(px - x - width / 2, py - y - height / 2));
    return far.indexOf(Math.min(...far));
  }

  /** The next node from `node` in a direction (dx, dy), or itself if there is none. */
  nodeBeyond(node, dx, dy) {
    const [x, y] = this.places[node];
    let best = node;
    let least = Infinity;
    this.places.forEach(([px, py], other) => {
      const along = (px - x) * dx + (py - y) * dy;
      const aside = Math.abs((px - x) * dy - (py - y) * dx);
      const cost = along + 2 * aside;
      if (other !== node && along > 0 && aside <= along * 1.5 && cost < least) [best, least] = [other, cost];
    });
    return best;
  }

  /** Show the rectangle [x, y, width, height] of the drawing. */
  zoomTo(rectangle) {
    this.frame = rectangle;
    this.svg.setAttribute("viewBox", rectangle.join(" "));
    this.svg.classList.toggle("zoomed", rectangle[2] < this.home[2] * 0.999);
  }

  /** Zoom by a factor about a place (in units of the drawing), never further out than the whole. */
  zoom(factor, about = null) {
    const [x, y, width, height] = this.frame;
    const scale = Math.min(Math.max(factor, (SPACING * 3) / width), this.home[2] / width);
    const [cx, cy] = about ?? [x + width / 2, y + height / 2];
    if (width * scale >= this.home[2] * 0.999) this.zoomTo(this.home);
    else this.zoomTo([cx - (cx - x) * scale, cy - (cy - y) * scale, width * scale, height * scale]);
  }

  /** Move what is shown by so many pixels. */
  pan(dx, dy) {
    const [x, y, width, height] = this.frame;
    const pixels = this.svg.getScreenCTM().a;
    this.zoomTo([x - dx / pixels, y - dy / pixels, width, height]);
  }

  /** Bring a node into sight. */
  reveal(node) {
    const [x, y, width, height] = this.frame;
    const [px, py] = this.places[node];
    const inside = px > x && px < x + width && py > y && py < y + height;
    if (!inside) this.zoomTo([px - width / 2, py - height / 2, width, height]);
  }
}

function shape(kind, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/** Positions scaled so that neighbours (the median over nodes of the nearest) are SPACING apart. */
function spread(positions) {
  const nearest = positions.map(([x, y], i) =>
    positions.reduce((least, [px, py], j) => (i === j ? least : Math.min(least, Math.hypot(px - x, py - y))), Infinity),
  );
  const middle = nearest.sort((a, b) => a - b)[nearest.length >> 1];
  const scale = SPACING / (Number.isFinite(middle) && middle > 0 ? middle : 1);
  return positions.map(([x, y]) => [x * scale, y * scale]);
}

function frame(places, margin) {
  const [xs, ys] = [places.map(([x]) => x), places.map(([, y]) => y)];
  const [left, top] = [Math.min(...xs) - margin, Math.min(...ys) - margin];
  return [left, top, Math.max(...xs) + margin - left, Math.max(...ys) + margin - top];
}

/** A slightly bent line, so that flows along one line of nodes stay apart. */
function curve([ax, ay], [bx, by]) {
  const [mx, my] = [(ax + bx) / 2 - (by - ay) * 0.14, (ay + by) / 2 + (bx - ax) * 0.14];
  return `M${ax} ${ay}Q${mx} ${my} ${bx} ${by}`;
}

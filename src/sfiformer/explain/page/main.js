// The controls, the panel beside the drawing, and what the keyboard does.

const LISTED = 10; // of the largest flows
const SLICE = 12; // milliseconds that counting over all queries may take at a time

const find = (id) => document.getElementById(id);
const record = new Record(JSON.parse(find("record").textContent));
const view = new View(find("graph"), record);
const state = { layer: 0, head: MEAN, query: 0, factor: 1, adjacent: false };
let shown; // the flows of the query

/** What `Record.flows` takes: λ is the trained one times the slider's factor. */
function problem(query = state.query) {
  const { layer, head, factor, adjacent } = state;
  return { layer, head, query, lam: record.layers[layer].lam * factor, adjacent };
}

function render() {
  const { layer, head, query, factor, adjacent } = state;
  const { heads, lam, scaling, gamma } = record.layers[layer];
  shown = record.flows(problem());
  const { flows, active } = shown;
  view.show(query, flows, active);

  find("layer").value = layer + 1;
  find("layer-value").value = `${layer + 1} of ${record.layers.length}`;
  find("head").max = heads + 1;
  find("head").value = head === MEAN ? heads + 1 : head + 1;
  find("head-value").value = head === MEAN ? `mean of ${heads}` : `${head + 1} of ${heads}`;
  describe("layer", find("layer-value").value);
  describe("head", find("head-value").value);
  find("lam").disabled = lam === 0;
  const name = scaling === "potential" ? "λ*" : "λ";
  find("lam-value").value = lam === 0 ? "0, dense" : `${name} = ${number(lam * factor)}`;
  describe("lam", lam === 0 ? "0" : `${find("lam-value").value}, ${number(factor)} times as trained`);
  find("trained").disabled = factor === 1;
  find("trained").textContent = factor === 1 ? "λ as trained" : `${number(factor)} × trained: reset`;
  find("adjacent").disabled = gamma === null;

  find("query").value = query;
  find("query-name").textContent = record.labels[query];
  find("query-said").textContent = record.said.nodes?.[query] ?? "";
  const hops = record.hops(query);
  const support = active.reduce((count, each) => count + each, 0);
  const zeros = record.n - support;
  tell(flows, hops, support, adjacent && gamma !== null);
  list(flows, active, hops);
  count();
  say(`Query ${record.labels[query]}: ${support} of ${record.n} nodes carry flow, ${zeros} are exactly zero.`);
}

/** The figures of the query. */
function tell(flows, hops, support, adjacent) {
  let [total, squares, near, walked] = [0, 0, 0, 0];
  flows.forEach((flow, node) => {
    total += flow;
    squares += flow * flow;
    if (hops[node] === Infinity) return;
    near += flow;
    walked += flow * hops[node];
  });
  find("zeros").textContent = record.n - support;
  find("support").textContent = `${support} of ${record.n}`;
  find("sum-name").textContent = adjacent ? "row sum" : "Σ z";
  find("sum").textContent = total.toFixed(4);
  find("effective").textContent = squares ? ((total * total) / squares).toFixed(1) : "none";
  find("distance").textContent = near ? `${(walked / near).toFixed(1)} hops` : "none";
}

function describe(id, text) {
  find(id).setAttribute("aria-valuetext", text);
}

/** The largest flows, each a button that makes its node the query. */
function list(flows, active, hops) {
  const order = [...flows.keys()].filter((node) => active[node]).sort((a, b) => flows[b] - flows[a]);
  const rows = order.slice(0, LISTED).map((node) => {
    const row = document.createElement("li");
    const button = document.createElement("button");
    button.type = "button";
    button.dataset.node = node;
    const bar = piece("bar", "");
    bar.style.width = `${(100 * flows[node]) / flows[order[0]]}%`;
    bar.style.background = colour(flows[node]);
    button.append(bar, piece("name", record.labels[node]), piece("hop", hopText(hops[node])));
    button.append(piece("flow", number(flows[node])));
    button.addEventListener("click", () => ask(node));
    for (const event of ["pointerenter", "focus"]) button.addEventListener(event, () => view.point(node));
    for (const event of ["pointerleave", "blur"]) button.addEventListener(event, () => view.point(null));
    row.append(button);
    return row;
  });
  const focused = find("largest").contains(document.activeElement);
  view.point(null);
  find("largest").replaceChildren(...rows);
  if (focused) rows[0]?.firstChild.focus();
  const rest = order.slice(LISTED).reduce((sum, node) => sum + flows[node], 0);
  const more = order.length - LISTED;
  find("rest").textContent = more > 0 ? `and ${number(rest)} in all from ${more} more` : "";
}

function piece(kind, text) {
  const span = document.createElement("span");
  span.className = kind;
  span.textContent = text;
  return span;
}

function hopText(hops) {
  if (hops === 0) return "itself";
  if (hops === Infinity) return "no path";
  return `${hops} hop${hops > 1 ? "s" : ""}`;
}

function number(value) {
  if (value === 0) return "0";
  return value >= 0.001 && value < 1000 ? String(Number(value.toPrecision(3))) : value.toExponential(1);
}

function percent(share) {
  return `${(100 * share).toFixed(1)}%`;
}

let counting = 0;
/** The share of exact zeros over all queries, a slice at a time so that nothing waits for it. */
function count() {
  const mine = ++counting;
  let zeros = 0;
  let query = 0;
  find("share").textContent = "…";
  const slice = () => {
    if (mine !== counting) return;
    for (const end = performance.now() + SLICE; query < record.n && performance.now() < end; query++) {
      zeros += record.flows(problem(query)).active.reduce((sum, each) => sum + (1 - each), 0);
    }
    if (query < record.n) setTimeout(slice);
    else find("share").textContent = percent(zeros / record.n ** 2);
  };
  setTimeout(slice);
}

let saying = 0;
/** Tell a screen reader, and the address, once the query or a slider has come to rest. */
function say(text) {
  clearTimeout(saying);
  saying = setTimeout(() => {
    find("status").textContent = text;
    history.replaceState(null, "", address());
  }, 400);
}

function ask(query) {
  state.query = query;
  view.reveal(query);
  render();
}

/** The slider is logarithmic, and its left end is 0. */
function factorOf(place) {
  return place < -2.001 ? 0 : 10 ** place;
}

find("layer").addEventListener("input", ({ target }) => {
  state.layer = target.value - 1;
  if (state.head >= record.layers[state.layer].heads) state.head = MEAN;
  render();
});
find("head").addEventListener("input", ({ target }) => {
  const head = target.value - 1;
  state.head = head < record.layers[state.layer].heads ? head : MEAN;
  render();
});
find("lam").addEventListener("input", ({ target }) => {
  state.factor = factorOf(target.value);
  render();
});
find("trained").addEventListener("click", () => {
  find("lam").value = 0;
  find("lam").focus(); // the button is about to be of no use
  state.factor = 1;
  render();
});
find("query").addEventListener("change", ({ target }) => {
  ask(Math.min(Math.max(Math.round(target.value) || 0, 0), record.n - 1));
});
find("controls").addEventListener("change", ({ target }) => {
  if (target.name !== "shown") return;
  state.adjacent = target.value === "adjacent";
  render();
});
window.addEventListener("resize", () => view.show(state.query, shown.flows, shown.active));
find("controls").addEventListener("submit", (event) => event.preventDefault());

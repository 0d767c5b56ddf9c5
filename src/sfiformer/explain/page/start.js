// What is set once, and the first picture.

find("facts").textContent = record.facts;
find("layer").max = record.layers.length;
find("layer-control").hidden = record.layers.length === 1;
find("head-control").hidden = record.layers.every(({ heads }) => heads === 1);
find("query").max = record.n - 1;

const stops = VIRIDIS.map(([r, g, b]) => `rgb(${r}, ${g}, ${b})`);
find("ramp").style.background = `linear-gradient(to right, ${stops.join(", ")})`;
for (const name of ["10⁻⁴", "10⁻³", "10⁻²", "0.1", "1"]) find("ticks").append(piece("tick", name)); // from LEAST to 1

find("said-section").hidden = !record.said.graph;
for (const cells of record.said.graph ?? []) {
  const row = find("said").insertRow();
  for (const text of cells) row.insertCell().textContent = text;
}

state.query = view.middle();
visit(location.hash || record.view);
render();
window.addEventListener("hashchange", () => {
  visit(location.hash);
  render();
});
globalThis.sfi = { record, solveFlows, state }; // for the console, and for tests

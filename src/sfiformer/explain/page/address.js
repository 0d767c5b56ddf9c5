// What is shown is kept behind the # of the address, so that a view can be linked to and is there again after a reload.

function address() {
  const { layer, head, query, adjacent } = state;
  const shown = adjacent ? "adjacent" : "flow";
  const fields = { layer: layer + 1, head: head === MEAN ? "mean" : head + 1, query, lam: find("lam").value, shown };
  return `#${new URLSearchParams(fields)}`;
}

/** Take the state from an address; what is missing or out of range there is left as it is. */
function visit(hash) {
  const fields = new URLSearchParams(hash.slice(1));
  const whole = (name, least, most) => {
    const value = Number(fields.get(name) ?? NaN);
    return Number.isInteger(value) && value >= least && value <= most ? value : null;
  };
  state.layer = (whole("layer", 1, record.layers.length) ?? state.layer + 1) - 1;
  const { heads, gamma, lam } = record.layers[state.layer];
  state.head = (whole("head", 1, heads) ?? MEAN + 1) - 1;
  state.query = whole("query", 0, record.n - 1) ?? state.query;
  state.adjacent = fields.get("shown") === "adjacent" && gamma !== null;
  find("lam").value = lam === 0 ? 0 : Number(fields.get("lam")) || 0; // the browser keeps it within the slider
  state.factor = factorOf(find("lam").value);
  find(state.adjacent ? "adjacent" : "flow").checked = true;
}

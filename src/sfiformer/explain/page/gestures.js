// Pointer and keyboard on the drawing.

const svg = find("graph");
const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const KEYS = {
  "+": () => view.zoom(1 / 1.3),
  "=": () => view.zoom(1 / 1.3),
  "-": () => view.zoom(1.3),
  "0": () => view.zoomTo(view.home),
};

svg.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key in MOVES) ask(view.nodeBeyond(state.query, ...MOVES[event.key]));
  else if (event.key in KEYS) KEYS[event.key]();
  else return;
  event.preventDefault();
});

let drag = null; // where a press began, and whether it has become a drag
svg.addEventListener("pointerdown", (event) => {
  if (event.button === 0) drag = { x: event.clientX, y: event.clientY, moved: false };
});
svg.addEventListener("pointermove", (event) => {
  if (drag && (drag.moved || Math.hypot(event.clientX - drag.x, event.clientY - drag.y) > 5)) {
    if (!drag.moved) svg.setPointerCapture(event.pointerId);
    view.pan(event.clientX - drag.x, event.clientY - drag.y);
    Object.assign(drag, { x: event.clientX, y: event.clientY, moved: true });
  }
  tip(event);
});
svg.addEventListener("pointerup", (event) => {
  const node = drag && !drag.moved ? view.nodeAt(event.clientX, event.clientY) : null;
  drag = null;
  if (node !== null) ask(node);
});
svg.addEventListener("pointercancel", () => (drag = null));
svg.addEventListener("pointerleave", () => {
  find("tip").hidden = true;
  view.point(null);
});
svg.addEventListener(
  "wheel",
  (event) => {
    if (event.deltaY > 0 && view.frame === view.home) return; // nothing more to show: the page may scroll
    event.preventDefault();
    const { x, y } = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    view.zoom(1.0015 ** event.deltaY, [x, y]);
  },
  { passive: false },
);

/** Beside the pointer: the node's name and what it sends to the query. */
function tip(event) {
  const node = drag?.moved || event.pointerType === "touch" ? null : view.nodeAt(event.clientX, event.clientY, 14);
  find("tip").hidden = node === null;
  view.point(node);
  if (node === null) return;
  const { flows, active } = shown;
  const flow = active[node] ? `flow ${number(flows[node])}` : "no flow";
  find("tip").textContent = [record.labels[node], flow, record.said.nodes?.[node]].filter(Boolean).join(" · ");
  const box = svg.getBoundingClientRect();
  const right = event.clientX - box.left > box.width / 2;
  find("tip").style.transform =
    `translate(${event.clientX - box.left + (right ? -12 : 12)}px, ${event.clientY - box.top + 12}px)` +
    (right ? " translateX(-100%)" : "");
}

find("zoom-in").addEventListener("click", () => view.zoom(1 / 1.5));
find("zoom-out").addEventListener("click", () => view.zoom(1.5));
find("zoom-fit").addEventListener("click", () => view.zoomTo(view.home));

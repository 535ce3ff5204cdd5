// One cursor through all charts of a node, by pointer, touch or keys: it reads values, and what is dragged over is zoomed to.

const DRAG_PX = 8, ZOOM = 4;

/**
 * Let `node` have a cursor. `moved(step, pinned)` hears where it is, null: nowhere; `zoom(from, to)` is called for a range
 * that was dragged over or asked for by keys, with null for the whole. Return a function that shows the cursor in new drawings.
 */
export function cursorIn(node, { moved = () => {}, zoom = null } = {}) {
  let step = null, pinned = null, drag = null;
  const charts = () => [...node.querySelectorAll("svg.chart")];
  const show = () => charts().forEach((chart) => chart.readAt(step));
  const move = (to) => { step = to; show(); moved(step, pinned); };
  const pin = (to) => { pinned = to; move(to); };
  const end = () => { drag?.chart.choose(null); drag = null; };

  node.addEventListener("pointermove", (event) => {
    const chart = event.target.closest?.("svg.chart");
    if (chart === null || chart === undefined) return;
    move(chart.stepAt(event.clientX));
    if (drag?.chart === chart && zoom !== null) chart.choose(drag.from, step);
  });
  node.addEventListener("pointerdown", (event) => {
    const chart = event.target.closest?.("svg.chart");
    if (chart && event.isPrimary && event.button === 0) drag = { chart, from: chart.stepAt(event.clientX), x: event.clientX };
  });
  node.addEventListener("pointerup", (event) => {
    if (drag === null) return;
    const { chart, from, x } = drag, to = chart.isConnected ? chart.stepAt(event.clientX) : from;
    end();
    if (zoom !== null && Math.abs(event.clientX - x) >= DRAG_PX) zoom(Math.min(from, to), Math.max(from, to));
    else pin(to);
  });
  node.addEventListener("pointercancel", end);
  node.addEventListener("pointerleave", () => { end(); move(pinned); });
  node.addEventListener("keydown", (event) => {
    const keys = charts()[0]?.keys;
    if (event.target !== node || keys === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    const { steps, from, to } = keys, at = step ?? to, index = steps.findLastIndex((one) => one <= at);
    const near = (by) => steps[Math.min(steps.length - 1, Math.max(0, index + by))];
    const around = (span) => [Math.max(from, at - span / 2), Math.min(to, at + span / 2)];
    const acts = {
      ArrowLeft: () => pin(near(-1)), ArrowRight: () => pin(near(1)), PageUp: () => pin(near(-10)), PageDown: () => pin(near(10)),
      Home: () => pin(steps[0]), End: () => pin(steps.at(-1)), Escape: () => { pin(null); zoom?.(null, null); },
      "+": () => zoom?.(...around((to - from) / ZOOM)), "-": () => zoom?.(null, null),
    };
    if (acts[event.key] === undefined) return;
    event.preventDefault();
    acts[event.key]();
  });
  return show;
}

// overlay.html: the curves of several runs over one another, of the records that the file itself contains (services/coordinator/records/overlay.py).

import { curves, widthIn } from "./charts.js";
import { cursorIn } from "./cursor.js";
import { byId, el } from "./dom.js";
import { valuesOf } from "./values.js";

const { runs: compared, metrics } = JSON.parse(byId("data").textContent);
let zoomed = null;

/** Return the steps at which any run has a point, and of each run the value there: of the bucket that holds the step. */
function aligned(pointsOf) {
  const all = compared.map(pointsOf).map(({ step, value }) => ({ step, value: value ?? [] }));
  const [from, to] = zoomed ?? [-Infinity, Infinity];
  const steps = [...new Set(all.flatMap(({ step }) => step))].filter((step) => step >= from && step <= to).toSorted((a, b) => a - b);
  const last = all.map(({ step, value }) => steps.map((at) => value[step.findIndex((end) => end >= at)] ?? null));
  return { steps, series: compared.map(({ name }, index) => ({ name, last: last[index], colour: index })).filter((one) => one.last.some(Number.isFinite)) };
}

function card(title, pointsOf, width) {
  const { steps, series } = aligned(pointsOf), axis = { steps, width, from: steps[0], to: steps.at(-1) };
  const drawing = curves(axis, series);
  if (drawing === null) return [];
  drawing[0].keys = axis;
  return [el("div", { class: "card curve", "data-curve": title }, el("h3", {}, title), drawing, valuesOf(title, drawing[0]))];
}

const ofMetric = (name) => ({ curves: { step, metrics: known } }) => ({ step, value: known[name]?.last });
const ofSet = (set) => ({ evaluations }) => {
  const known = evaluations.filter((one) => one.set === set && Number.isFinite(one.accuracy)).toSorted((a, b) => a.step - b.step);
  return { step: known.map((one) => one.step), value: known.map((one) => one.accuracy) };
};

function draw() {
  const node = byId("curves"), width = widthIn(node);
  const sets = [...new Set(compared.flatMap(({ evaluations }) => evaluations.map((one) => one.set)))];
  node.replaceChildren(
    ...sets.flatMap((set) => card(`held-out accuracy: ${set}`, ofSet(set), width)),
    ...metrics.flatMap((name) => card(name.replaceAll("_", " "), ofMetric(name), width)),
  );
}

document.title = `Penstock: ${compared.map(({ name }) => name).join(", ")}`;
byId("head").append(el("h1", {}, `${compared.length} runs`), el("p", { class: "soft" }, "Drag over a curve to zoom; Escape shows all."));
byId("main").hidden = false; // before it is drawn there is nothing to see
draw();
const show = cursorIn(byId("curves"), { zoom: (from, to) => { zoomed = from === null ? null : [from, to]; draw(); show(); } });
addEventListener("resize", draw);

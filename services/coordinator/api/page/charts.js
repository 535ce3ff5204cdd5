// Curves and stacks as SVG, drawn at the pixels they are shown at. What a pointer or a key does with them is in cursor.js.

import { el, figure, svg } from "./dom.js";

const HEIGHT = 210, LEFT = 50, RIGHT = 12, TOP = 8, BOTTOM = 36, TICKS = 4;
const GAP = 14, LEAST_CARD = 350, PADDING = 34, MOST = 640;
/** Pixels of a character and of a line, about. */
const CHARACTER = 6.5, ROW = 15;
/** A stack is shown up to so many times what 95 % of its points stay below. */
const PEAK = 2;
/** Colours of series (look.css); the one after them, grey, is of what is no series of its own. Later series are dashed. */
export const COLOURS = 13;

/**
 * Return a chart of `series` ({name, last, low?, high?, points?}) over `axis` ({steps, width, unit?, from?, to?, marks?,
 * evaluated?}): a line for each bucket's last value, and a band from its minimum to its maximum. `bands` ({name, low, high}) are
 * drawn behind; null leaves a gap; `low` and `high` widen the range of values. Null when there is no value at all.
 */
export function curves(axis, series, { bands = [], low = null, high = null } = {}) {
  const known = [...series.flatMap((one) => [one.last, one.low ?? [], one.high ?? []]), ...bands.flatMap((band) => [band.low, band.high])].flat().filter(Number.isFinite);
  if (known.length === 0) return null;
  const bounds = [...known, low, high].filter((bound) => bound !== null);
  const rows = ticks(bounds.reduce((a, b) => Math.min(a, b)), bounds.reduce((a, b) => Math.max(a, b)));
  const scale = scaleOf(axis, rows);
  return picture(axis, scale, series, bands, [
    ...grid(scale, rows, axis),
    ...bands.flatMap((band, index) => area(scale, axis.steps, band.low, band.high, `band b${index}`)),
    ...series.flatMap((one, index) => (one.low ? area(scale, axis.steps, one.low, one.high, `range ${colour(one, index)}`) : [])),
    ...series.flatMap((one, index) => line(scale, axis.steps, one, colour(one, index))),
    ...marksOf(scale, axis),
  ]);
}

/**
 * Return a chart in which each series stands on those before it; rare peaks are cut off at the top, not in what is told.
 * An area has its name where there is room. `phases` are names of each place, drawn as bands behind in the colour `colourOf` gives.
 */
export function stack(axis, series, phases = [], colourOf = () => COLOURS) {
  series = series.map((one, index) => ({ colour: index, ...one })).filter((one) => one.last.some(Boolean));
  if (series.length === 0) return null;
  let tops = [axis.steps.map(() => 0)];
  for (const one of series) tops.push(tops.at(-1).map((base, index) => base + (one.last[index] ?? 0)));
  const sorted = tops.at(-1).toSorted((a, b) => a - b);
  const most = sorted[Math.floor(0.95 * (sorted.length - 1))];
  const rows = ticks(0, Math.min(sorted.at(-1), PEAK * most || 1));
  const scale = scaleOf(axis, rows);
  tops = tops.map((top) => top.map((value) => Math.min(value, rows.at(-1))));
  const areas = series.flatMap((one, index) => area(scale, axis.steps, tops[index], tops[index + 1], `stack ${colour(one, index)}`));
  const names = series.map((one, index) => nameOf(scale, axis.steps, tops[index], tops[index + 1], one.name));
  return picture({ ...axis, phases }, scale, series, [], [...phaseBands(scale, axis.steps, phases, colourOf), ...grid(scale, rows, axis), ...areas, ...names.filter(Boolean), ...marksOf(scale, axis)]);
}

/** Return round values from at or below `low` to at or above `high`. */
export function ticks(low, high) {
  if (high - low < 1e-9 * Math.max(1, Math.abs(high))) [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  const rough = (high - low) / TICKS;
  const size = 10 ** Math.floor(Math.log10(rough));
  const width = size * [1, 2, 2.5, 5, 10].find((factor) => size * factor >= rough * 0.999);
  const first = Math.floor(low / width + 1e-9), last = Math.ceil(high / width - 1e-9);
  return Array.from({ length: last - first + 1 }, (_, index) => Number(((first + index) * width).toPrecision(12)));
}

/** Return the pixels that a chart has in a card of the grid `node` (`.grid-of`, look.css). */
export function widthIn(node) {
  const columns = Math.max(1, Math.floor((node.clientWidth + GAP) / (LEAST_CARD + GAP)));
  return Math.min(MOST, Math.max(200, Math.floor((node.clientWidth - GAP * (columns - 1)) / columns) - PADDING));
}

// ---------------------------------------------------------------- marks

const colour = (one, index) => (one.colour === undefined && index >= COLOURS ? `s${index % COLOURS} again` : `s${one.colour ?? index}`);

/** The drawing, and below it each series' name with its value at the cursor, at first the newest one. */
function picture(axis, scale, series, bands, children) {
  const unit = axis.unit ?? "step";
  const cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  const chosen = svg("rect", { class: "chosen", y: TOP, height: HEIGHT - TOP - BOTTOM, visibility: "hidden" });
  const values = series.map(() => el("b", {})), of = bands.map(() => el("b", {})), where = el("span", { class: "where" });
  const keys = series.map((one, index) => el("span", { class: `key ${colour(one, index)}` }, `${one.name} `, values[index]));
  const drawn = svg("svg", { class: "chart", width: axis.width, height: HEIGHT, viewBox: `0 0 ${axis.width} ${HEIGHT}`, role: "img" }, children, chosen, cursor);
  const legend = el("div", { class: "legend" }, keys, bands.map((band, index) => el("span", {}, `${band.name} `, of[index])), where);
  drawn.stepAt = (clientX) => {
    const box = drawn.getBoundingClientRect();
    return scale.stepOf(((clientX - box.left) / box.width) * axis.width);
  };
  drawn.choose = (from, to) => {
    chosen.setAttribute("visibility", from === null ? "hidden" : "visible");
    if (from === null) return;
    chosen.setAttribute("x", scale.x(Math.min(from, to)));
    chosen.setAttribute("width", Math.abs(scale.x(to) - scale.x(from)));
  };
  drawn.readAt = (step) => {
    const index = step === null ? axis.steps.length - 1 : nearest(axis.steps, step);
    const newest = (last) => (step === null ? last.findLast(Number.isFinite) : last[index]);
    series.forEach((one, place) => { values[place].textContent = `${figure(newest(one.last))}${spreadOf(one, index)}`; });
    bands.forEach((band, place) => { of[place].textContent = `${figure(band.low[index])} to ${figure(band.high[index])}`; });
    where.textContent = step === null ? "" : `${unit} ${Math.round(axis.steps[index] ?? 0).toLocaleString("en")}${axis.phases?.[index] ? `, ${axis.phases[index]}` : ""}`;
    cursor.setAttribute("visibility", step === null ? "hidden" : "visible");
    for (const side of ["x1", "x2"]) cursor.setAttribute(side, scale.x(axis.steps[index] ?? 0));
  };
  const now = series.map((one) => `${one.name} ${figure(one.last.findLast(Number.isFinite))}`).join(", ");
  drawn.setAttribute("aria-label", `${now} at ${unit} ${Math.round(axis.steps.at(-1) ?? 0)}`);
  drawn.readAt(null);
  drawn.values = { unit, steps: axis.steps, series, bands };
  return [drawn, legend];
}

const spreadOf = (one, index) => (one.low && one.low[index] !== one.high[index] ? ` (${figure(one.low[index])} to ${figure(one.high[index])})` : "");

const nearest = (steps, step) => steps.reduce((best, one, index) => (Math.abs(one - step) < Math.abs(steps[best] - step) ? index : best), 0);

function scaleOf({ steps, width, from, to }, rows) {
  const first = from ?? steps[0] ?? 0, span = (to ?? steps.at(-1) ?? 0) - first || 1;
  const floor = rows[0], height = rows.at(-1) - floor || 1, wide = width - LEFT - RIGHT;
  return {
    x: (step) => LEFT + ((step - first) / span) * wide,
    y: (value) => HEIGHT - BOTTOM - ((value - floor) / height) * (HEIGHT - TOP - BOTTOM),
    stepOf: (x) => first + Math.min(1, Math.max(0, (x - LEFT) / wide)) * span,
    first, last: first + span, right: width - RIGHT,
  };
}

function grid(scale, rows, axis) {
  const lines = rows.flatMap((value) => {
    const y = scale.y(value);
    return [
      svg("line", { class: "grid", x1: LEFT, x2: scale.right, y1: y, y2: y }),
      svg("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, tick(value, rows)),
    ];
  });
  const columns = ticks(scale.first, scale.last)
    .filter((step) => step >= scale.first && step <= scale.last && Number.isInteger(step))
    .map((step) => svg("text", { x: scale.x(step), y: HEIGHT - 20, "text-anchor": "middle" }, step.toLocaleString("en")));
  return [...lines, ...columns, svg("text", { class: "title", x: (LEFT + scale.right) / 2, y: HEIGHT - 4, "text-anchor": "middle" }, axis.title ?? axis.unit ?? "step")];
}

/** Lines where something happened to the run, and ticks where it was evaluated. */
function marksOf(scale, { marks = [], evaluated = [] }) {
  const within = (step) => step >= scale.first && step <= scale.last;
  return [
    ...marks.filter((mark) => within(mark.step)).map((mark) => svg("line", { class: `mark ${mark.kind}`, x1: scale.x(mark.step), x2: scale.x(mark.step), y1: TOP, y2: HEIGHT - BOTTOM }, svg("title", {}, `step ${mark.step}: ${mark.text}`))),
    ...evaluated.filter(within).map((step) => svg("line", { class: "mark evaluation", x1: scale.x(step), x2: scale.x(step), y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM + 5 })),
  ];
}

function tick(value, rows) {
  const largest = Math.max(...rows.map(Math.abs));
  if (largest >= 10000) return `${Number((value / 1000).toPrecision(4))}k`;
  if (value !== 0 && largest < 0.01) return value.toExponential(1).replace(".0e", "e");
  return String(Number(value.toPrecision(6)));
}

function line(scale, steps, one, name) {
  return runs(steps, one.last).flatMap((run) => {
    const places = run.map(([step, value]) => `${scale.x(step).toFixed(1)},${scale.y(value).toFixed(1)}`).join(" ");
    const dots = one.points || run.length === 1 ? run : [];
    return [
      svg("polyline", { class: `line ${name}`, points: places }),
      ...dots.map(([step, value]) => svg("circle", { class: `dot ${name}`, cx: scale.x(step), cy: scale.y(value), r: 3 })),
    ];
  });
}

function area(scale, steps, low, high, name) {
  const both = steps.map((_, index) => (Number.isFinite(low[index]) && Number.isFinite(high[index]) ? index : null));
  return runs(steps, both).map((run) => {
    const place = (side) => ([step, index]) => `${scale.x(step).toFixed(1)},${scale.y(side[index]).toFixed(1)}`;
    const points = [...run.map(place(high)), ...run.toReversed().map(place(low))].join(" ");
    return svg("polygon", { class: name, points });
  });
}

/** Return an area's name at its highest place, or null where it does not fit. */
function nameOf(scale, steps, low, high, name) {
  const half = (name.length * CHARACTER) / 2, places = steps.map((step) => scale.x(step));
  let best = null;
  for (const at of places) {
    const x = Math.min(Math.max(at, LEFT + half), scale.right - half);
    const first = Math.max(0, places.findLastIndex((place) => place <= x - half)), past = places.findIndex((place) => place >= x + half);
    const of = (side) => side.slice(first, past < 0 ? undefined : past + 1).map((value) => scale.y(value));
    const bottom = Math.min(...of(low)), top = Math.max(...of(high));
    if (bottom - top >= Math.max(ROW, best?.room ?? 0)) best = { room: bottom - top, x, y: (bottom + top) / 2 };
  }
  return best && svg("text", { class: "name", x: best.x, y: best.y + 4, "text-anchor": "middle" }, name);
}

/** Return a rectangle for each run of places in one phase, coloured by the phase. */
function phaseBands(scale, steps, phases, colourOf) {
  const half = steps.length > 1 ? (steps[1] - steps[0]) / 2 : 0.5;
  const starts = phases.map((phase, index) => (phase !== phases[index - 1] ? index : -1)).filter((index) => index >= 0 && phases[index]);
  return starts.map((start) => {
    let end = start;
    while (phases[end + 1] === phases[start]) end += 1;
    const x = scale.x(steps[start] - half);
    const place = { class: `phase s${colourOf(phases[start])}`, x, y: TOP, width: Math.max(0, scale.x(steps[end] + half) - x), height: HEIGHT - TOP - BOTTOM };
    return svg("rect", place, svg("title", {}, phases[start]));
  });
}

/** Part a curve at its gaps. */
function runs(steps, values) {
  const found = [[]];
  values.forEach((value, index) => {
    if (Number.isFinite(value)) found.at(-1).push([steps[index], value]);
    else if (found.at(-1).length > 0) found.push([]);
  });
  return found.filter((run) => run.length > 0);
}

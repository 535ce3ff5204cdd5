// Curves as SVG.

import { el, figure, svg } from "./dom.js";

const WIDTH = 440, HEIGHT = 200, LEFT = 48, RIGHT = 10, TOP = 8, BOTTOM = 24;
const MOST_POINTS = 240, TICKS = 4;
/** A stack is shown up to so many times what 95 % of its points stay below. */
const PEAK = 2;

/**
 * Return a chart of `series` ({name, values, points?}) over `steps`, with `bands` ({name, low, high}); a value that is null
 * leaves a gap. `low` and `high` widen its range. Null when there is no value at all.
 */
export function curves(steps, series, { bands = [], low = null, high = null } = {}) {
  [steps, series, bands] = thinned(steps, series, bands);
  const known = [...series.map((one) => one.values), ...bands.flatMap((band) => [band.low, band.high])].flat().filter(Number.isFinite);
  if (known.length === 0) return null;
  const wanted = [...known, low, high].filter((bound) => bound !== null);
  const marks = ticks(Math.min(...wanted), Math.max(...wanted));
  const scale = scaleOf(steps, marks);
  return picture([
    ...grid(scale, marks),
    ...bands.flatMap((band, index) => area(scale, steps, band.low, band.high, `band b${index}`)),
    ...series.flatMap((one, index) => line(scale, steps, one, index)),
    ...tips(scale, steps, series, bands),
  ], steps, series);
}

/**
 * Return a chart in which each series stands on those before it; rare peaks are cut off at the top, not in what is told.
 * `unit` names what is along the bottom; `phases` are names of each place, drawn as bands behind.
 */
export function stack(steps, series, { unit = "step", phases = [] } = {}) {
  [steps, series] = thinned(steps, series.filter((one) => one.values.some(Boolean)), []);
  if (series.length === 0) return null;
  let tops = [steps.map(() => 0)];
  for (const one of series) tops.push(tops.at(-1).map((base, index) => base + (one.values[index] ?? 0)));
  const sorted = tops.at(-1).toSorted((a, b) => a - b);
  const most = sorted[Math.floor(0.95 * (sorted.length - 1))];
  const marks = ticks(0, Math.min(sorted.at(-1), PEAK * most || 1));
  const scale = scaleOf(steps, marks);
  tops = tops.map((top) => top.map((value) => Math.min(value, marks.at(-1))));
  const areas = series.flatMap((_, index) => area(scale, steps, tops[index], tops[index + 1], `stack s${index % 6}`));
  const behind = phaseBands(scale, steps, phases);
  return picture([...behind, ...grid(scale, marks), ...areas, ...tips(scale, steps, series, [], unit, phases)], steps, series, unit);
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

// ---------------------------------------------------------------- marks

function picture(marks, steps, series, unit = "step") {
  const now = series.map((one) => `${one.name} ${figure(one.values.findLast(Number.isFinite))}`).join(", ");
  const label = `${now} at ${unit} ${Math.round(steps.at(-1) ?? 0)}`;
  const drawn = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label }, marks);
  const keys = series.map((one, index) => el("span", { class: `key s${index % 6}` }, one.name));
  return [drawn, el("div", { class: "legend" }, series.length > 1 ? keys : "")];
}

function scaleOf(steps, marks) {
  const first = Math.min(...steps), span = Math.max(...steps) - first || 1;
  const floor = marks[0], height = marks.at(-1) - floor || 1;
  return {
    x: (step) => LEFT + ((step - first) / span) * (WIDTH - LEFT - RIGHT),
    y: (value) => HEIGHT - BOTTOM - ((value - floor) / height) * (HEIGHT - TOP - BOTTOM),
    first, last: first + span,
  };
}

function grid(scale, marks) {
  const rows = marks.flatMap((value) => {
    const y = scale.y(value);
    return [
      svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y }),
      svg("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, tick(value, marks)),
    ];
  });
  const columns = ticks(scale.first, scale.last)
    .filter((step) => step >= scale.first && step <= scale.last && Number.isInteger(step))
    .map((step) => svg("text", { x: scale.x(step), y: HEIGHT - 6, "text-anchor": "middle" }, step.toLocaleString("en")));
  return [...rows, ...columns];
}

function tick(value, marks) {
  const largest = Math.max(...marks.map(Math.abs));
  if (largest >= 10000) return `${Number((value / 1000).toPrecision(4))}k`;
  if (value !== 0 && largest < 0.01) return value.toExponential(1).replace(".0e", "e");
  return String(Number(value.toPrecision(6)));
}

function line(scale, steps, one, index) {
  return runs(steps, one.values).flatMap((run) => {
    const places = run.map(([step, value]) => `${scale.x(step).toFixed(1)},${scale.y(value).toFixed(1)}`).join(" ");
    const dots = one.points || run.length === 1 ? run : [];
    return [
      svg("polyline", { class: `line s${index % 6}`, points: places }),
      ...dots.map(([step, value]) => svg("circle", { class: `dot s${index % 6}`, cx: scale.x(step), cy: scale.y(value), r: 3 })),
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

/** Return a rectangle for each run of places in one phase, coloured by the phase. */
function phaseBands(scale, steps, phases) {
  const names = [...new Set(phases.filter(Boolean))], half = steps.length > 1 ? (steps[1] - steps[0]) / 2 : 0.5;
  const starts = phases.map((phase, index) => (phase !== phases[index - 1] ? index : -1)).filter((index) => index >= 0 && phases[index]);
  return starts.map((start) => {
    let end = start;
    while (phases[end + 1] === phases[start]) end += 1;
    const x = scale.x(steps[start] - half);
    const place = { class: `phase p${names.indexOf(phases[start]) % 6}`, x, y: TOP, width: Math.max(0, scale.x(steps[end] + half) - x), height: HEIGHT - TOP - BOTTOM };
    return svg("rect", place, svg("title", {}, phases[start]));
  });
}

function tips(scale, steps, series, bands, unit = "step", phases = []) {
  const width = (WIDTH - LEFT - RIGHT) / Math.max(1, steps.length);
  return steps.map((step, index) => {
    const told = [`${unit} ${Math.round(step).toLocaleString("en")}${phases[index] ? `: ${phases[index]}` : ""}`];
    for (const one of series) if (Number.isFinite(one.values[index])) told.push(`${one.name} ${figure(one.values[index])}`);
    for (const band of bands) told.push(`${band.name} ${figure(band.low[index])} to ${figure(band.high[index])}`);
    const place = { class: "tip", x: scale.x(step) - width / 2, y: TOP, width, height: HEIGHT - TOP - BOTTOM };
    return svg("rect", place, svg("title", {}, told.join("\n")));
  });
}

// ---------------------------------------------------------------- values

/** Part a curve at its gaps. */
function runs(steps, values) {
  const found = [[]];
  values.forEach((value, index) => {
    if (Number.isFinite(value)) found.at(-1).push([steps[index], value]);
    else if (found.at(-1).length > 0) found.push([]);
  });
  return found.filter((run) => run.length > 0);
}

/** Average long series down to `MOST_POINTS`. */
function thinned(steps, series, bands) {
  const width = Math.ceil(steps.length / MOST_POINTS);
  if (width <= 1) return [steps, series, bands];
  const average = (values) => Array.from({ length: Math.ceil(values.length / width) }, (_, cut) => {
    const known = values.slice(cut * width, (cut + 1) * width).filter(Number.isFinite);
    return known.length === 0 ? null : known.reduce((sum, value) => sum + value, 0) / known.length;
  });
  return [
    average(steps),
    series.map((one) => ({ ...one, values: average(one.values) })),
    bands.map((band) => ({ ...band, low: average(band.low), high: average(band.high) })),
  ];
}

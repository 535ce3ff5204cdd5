// What processes hold on each device: stacked areas over time, with the phases as bands.

import { stack, widthIn } from "./charts.js";
import { phaseColour } from "./curves.js";
import { el, redraw } from "./dom.js";
import { valuesOf } from "./values.js";

const GIB = 2 ** 30, PLACES = 160;
/** Components in the order of the stack. */
const ORDER = ["weights", "shadow", "key-value cache", "reference", "critic", "master weights", "moments", "snapshots", "gradients", "gradients in float32", "reduction", "activations", "graphs and logits", "other"];

/** Show a chart for each device of `reports` (GET /v1/run/memory, oldest first). */
export function drawMemory(node, reports) {
  const width = widthIn(node);
  redraw(node, [reports.length, reports.at(-1)?.id ?? null, width], () => {
    const samples = reports.flatMap((report) => report.samples.map((sample) => ({ ...sample, replica: report.replica })));
    const devices = [...new Set(samples.map((sample) => sample.device))].toSorted();
    if (devices.length === 0) return el("p", { class: "soft" }, "nothing yet");
    return devices.map((device) => deviceCard(device, samples.filter((sample) => sample.device === device), width));
  });
}

function deviceCard(device, samples, pixels) {
  const capacity = samples.at(-1).capacity_bytes / GIB;
  const replicas = [...new Set(samples.map((sample) => sample.replica))].toSorted();
  const note = `GiB of ${capacity.toPrecision(3)}, by ${replicas.join(", ")}; seconds since ${new Date(beginOf(samples) * 1000).toLocaleTimeString("en-GB")}`;
  const chart = memoryChart(samples, replicas, pixels);
  return el("div", { class: "card curve memory", "data-device": device }, el("h3", {}, device, " ", el("small", {}, note)), ...chart, chart.length > 0 ? valuesOf(`memory of ${device}`, chart[0]) : null);
}

const beginOf = (samples) => Math.min(...samples.map((sample) => sample.ended_at_s - sample.seconds));

function memoryChart(samples, replicas, pixels) {
  const first = beginOf(samples), last = Math.max(...samples.map((sample) => sample.ended_at_s));
  const width = (last - first) / PLACES || 1;
  const times = Array.from({ length: PLACES }, (_, place) => (place + 0.5) * width);
  const held = replicas.map((replica) => samplesAt(samples.filter((sample) => sample.replica === replica), first, width));
  const names = [...new Set(samples.flatMap((sample) => Object.keys(sample.components)))].toSorted((a, b) => ORDER.indexOf(a) - ORDER.indexOf(b));
  const series = names.map((name) => ({ name, colour: ORDER.indexOf(name) < 0 ? ORDER.length - 1 : ORDER.indexOf(name), last: times.map((_, place) => held.reduce((sum, own) => sum + (own[place]?.components[name] ?? 0), 0) / GIB) }));
  const leading = held[Math.max(0, replicas.findIndex((replica) => replica.startsWith("trainer")))];
  const axis = { steps: times, width: pixels, from: 0, to: last - first, unit: "second" };
  const drawing = stack(axis, series, leading.map((sample) => sample?.phase ?? null), phaseColour) ?? [];
  if (drawing.length > 0) drawing[0].keys = axis;
  return drawing;
}

/** Return one process's sample at each place: the largest that overlaps it, else the one before. */
function samplesAt(own, first, width) {
  const at = Array.from({ length: PLACES }, () => null);
  for (const sample of own) {
    const from = Math.max(0, Math.floor((sample.ended_at_s - sample.seconds - first) / width));
    const to = Math.min(PLACES - 1, Math.floor((sample.ended_at_s - first) / width));
    for (let place = from; place <= to; place += 1) if (at[place] === null || sample.total_bytes > at[place].total_bytes) at[place] = sample;
  }
  for (let place = 1; place < PLACES; place += 1) at[place] ??= at[place - 1];
  return at;
}

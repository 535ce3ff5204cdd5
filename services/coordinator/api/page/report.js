// report.html: the curves and rollouts of the page, of the records that the file itself contains (services/coordinator/records/report.py).

import { cursorIn } from "./cursor.js";
import { drawCurves, isSupervised, PHASES, rangeOf, within } from "./curves.js";
import { drawMemory } from "./memory.js";
import { drawRollouts } from "./rollouts.js";
import { byId, clock, duration, el, figure } from "./dom.js";

const { run_id: run, written_at_s: writtenAtS, summary, curves: whole, seconds: means, lags: samples, ends, evaluations, rollouts, doubts, events, settings, memory } = JSON.parse(byId("data").textContent);
const supervised = isSupervised(whole.metrics);
const most = (name) => (whole.metrics[name]?.high ?? whole.metrics[name]?.last ?? []).reduce((a, b) => Math.max(a, b ?? a), -Infinity);
const sum = (values) => values.reduce((total, value) => total + value, 0);

function head() {
  const state = summary.state ?? (whole.steps === 0 ? "no step yet" : "no summary yet");
  const at = new Date((summary.finished_at_s ?? writtenAtS) * 1000).toISOString().slice(0, 16).replace("T", " ");
  document.title = `Penstock: ${run}`;
  return [
    el("div", { class: "head" }, el("h1", {}, run), el("span", { class: "state" }, state)),
    el("p", { class: "soft" }, `a Penstock run, ${at} UTC`),
    el("p", { class: "soft" }, summary.reason ?? ""),
    ...Object.entries(summary.missing ?? {}).map(([artifact, why]) => el("p", { class: "bad" }, `without its ${artifact}: ${why}`)),
    ...doubts.map((doubt) => el("p", { class: "bad" }, doubt)),
  ];
}

function tiles() {
  const accuracies = evaluations.filter(({ set }) => set === evaluations[0].set).map(({ accuracy }) => accuracy);
  const ended = summary.state !== undefined;
  const change = (before, after) => (before ?? after ?? null) !== null && `${figure(before)} → ${figure(after)}`;
  return [
    ["held-out accuracy, before → after", ended ? change(summary.accuracy_before, summary.accuracy_after) : change(accuracies[0], accuracies.at(-1))],
    ["mean reward, first → last steps", change(...ends.reward_mean)],
    ...(supervised ? [["loss, first → last steps", change(...ends.loss)], ["held-out loss, first → last", change(...ends.evaluation_loss)]] : []),
    ["optimizer steps", figure(summary.steps ?? whole.last_step)],
    ["training time", duration(summary.training_s)],
    ["samples per second", figure(summary.samples_per_s)],
    !supervised && ["largest lag, in steps", figure(most("lag_max"))],
  ].filter(Boolean).filter(([, value]) => value && value !== "–").map(([name, value]) => el("div", { class: "card tile" }, el("b", {}, value), el("span", {}, name)));
}

function seconds() {
  const names = { step_s: "whole step", ...PHASES, generate_s_mean: "generate one group", score_s_mean: "score one group" };
  return Object.entries(names).filter(([name]) => means[name] !== undefined).map(([name, label]) => [label, means[name].toFixed(3)]);
}

function groups() {
  const counts = Object.entries(summary.counts ?? {}).toSorted(([a], [b]) => (b === "trained") - (a === "trained"));
  return [["admitted", summary.groups_admitted], ...counts].filter(([, count]) => Number.isFinite(count)).map(([name, count]) => [name, figure(count)]);
}

function lags() {
  const total = sum(Object.values(samples));
  return Object.entries(samples).map(([lag, count]) => [lag, figure(count), `${((100 * count) / total).toFixed(1)}%`]);
}

/** Each of the user's functions, once for each of its source files. */
function functions() {
  return Object.entries(summary.functions ?? {}).flatMap(([name, sources]) => sources.map((source) => [name, source.after_version ?? "from the start", source.sha256]));
}

function table(title, rows, names = []) {
  const isFigure = (index) => (index > 0 && names[0] !== "time" ? "number" : "");
  const cells = (kind, row) => el("tr", {}, row.map((cell, index) => el(kind, { class: isFigure(index) }, String(cell))));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title }, el("table", {}, names.length > 0 ? el("thead", {}, cells("th", names)) : "", el("tbody", {}, rows.map((row) => cells("td", row)))));
}

const card = (title, rows, names) => rows.length > 0 && el("div", { class: "card" }, el("h3", {}, title), table(title, rows, names));
const fold = (title, rows, names) => rows.length > 0 && el("details", { class: "card" }, el("summary", {}, title), table(title, rows, names));
const pairs = (object) => Object.entries(object).filter(([, value]) => typeof value !== "object" || value === null);
const put = (id, children) => byId(id).append(...children.filter(Boolean));

byId("main").hidden = false; // before it is drawn there is nothing to see
put("head", head());
put("tiles", tiles());
let zoomed = null;
const drawZoomed = () => {
  const view = zoomed === null ? whole : within(whole, ...zoomed);
  byId("range").textContent = `${rangeOf(view)} Drag over a curve to zoom; Escape shows all.`;
  drawCurves(byId("curves"), view, evaluations, null, zoomed);
};
const show = cursorIn(byId("curves"), { zoom: (from, to) => { zoomed = from === null ? null : [from, to]; drawZoomed(); show(); } });
drawZoomed();
cursorIn(byId("memory"));
addEventListener("resize", drawZoomed);
drawMemory(byId("memory"), memory);
put("tables", [card("Mean seconds per step", seconds()), card("Groups", groups()), card("Samples by lag", lags(), ["lag, in steps", "samples", "share"])]);
drawRollouts(byId("rollouts"), rollouts, { tokens: async (group, place) => group.tokens[place] });
put("records", [
  fold("summary", pairs(summary)),
  fold("versions", Object.entries(summary.versions ?? {})),
  fold("your functions", functions(), ["function", "after version", "SHA-256 of its source file"]),
  fold("events", events.map((event) => [Number.isFinite(event.at_s) ? clock(event.at_s) : "", event.source ?? "", event.name ?? "", event.detail ?? ""]), ["time", "from", "event", "what"]),
  settings && el("details", { class: "card" }, el("summary", {}, "settings"), el("pre", { tabindex: "0" }, settings)),
]);

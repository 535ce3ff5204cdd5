// report.html: the curves and rollouts of the page, of the records that the file itself contains (services/coordinator/records/report.py).

import { drawCurves, isSupervised, PHASES } from "./curves.js";
import { drawMemory } from "./memory.js";
import { drawRollouts } from "./rollouts.js";
import { byId, clock, duration, el, figure } from "./dom.js";

const { run_id: run, written_at_s: writtenAtS, summary, steps, columns, ends, evaluations, rollouts, doubts, events, settings, memory } = JSON.parse(byId("data").textContent);
const valuesOf = (name) => (columns[name] ?? []).filter(Number.isFinite);
const sum = (values) => values.reduce((total, value) => total + value, 0);

function head() {
  const state = summary.state ?? (steps.length === 0 ? "no step yet" : "no summary yet");
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
    ...(isSupervised(columns.reward_mean, columns.loss) ? [["loss, first → last steps", change(...ends.loss)], ["held-out loss, first → last", change(...ends.evaluation_loss)]] : []),
    ["optimizer steps", figure(summary.steps ?? steps.at(-1))],
    ["training time", duration(summary.training_s)],
    ["samples per second", figure(summary.samples_per_s)],
    !isSupervised(columns.reward_mean, columns.loss) && ["largest lag, in steps", figure(valuesOf("lag_max").toSorted((a, b) => a - b).at(-1))],
  ].filter(Boolean).filter(([, value]) => value && value !== "–").map(([name, value]) => el("div", { class: "card tile" }, el("b", {}, value), el("span", {}, name)));
}

/** A phase that few steps have, such as a checkpoint, is averaged over all steps. */
function seconds() {
  const names = Object.entries({ step_s: "whole step", ...PHASES }).map(([name, label]) => [name, label, steps.length]);
  const groups = [["generate_s_mean", "generate one group"], ["score_s_mean", "score one group"]];
  return [...names, ...groups.map(([name, label]) => [name, label, valuesOf(name).length])]
    .filter(([name]) => valuesOf(name).length > 0)
    .map(([name, label, count]) => [label, (sum(valuesOf(name)) / count).toFixed(3)]);
}

function groups() {
  const counts = Object.entries(summary.counts ?? {}).toSorted(([a], [b]) => (b === "trained") - (a === "trained"));
  return [["admitted", summary.groups_admitted], ...counts].filter(([, count]) => Number.isFinite(count)).map(([name, count]) => [name, figure(count)]);
}

function lags() {
  const samples = {};
  for (const counts of columns.lag_counts ?? []) for (const [lag, count] of Object.entries(counts ?? {})) samples[lag] = (samples[lag] ?? 0) + count;
  const total = sum(Object.values(samples));
  return Object.entries(samples).map(([lag, count]) => [lag, figure(count), `${((100 * count) / total).toFixed(1)}%`]);
}

/** Each of the user's functions, once for each of its source files. */
function functions() {
  return Object.entries(summary.functions ?? {}).flatMap(([name, sources]) => sources.map((source) => [name, source.after_version ?? "from the start", source.sha256]));
}

function table(rows, names = []) {
  const isFigure = (index) => (index > 0 && names[0] !== "time" ? "number" : "");
  const cells = (kind, row) => el("tr", {}, row.map((cell, index) => el(kind, { class: isFigure(index) }, String(cell))));
  return el("div", { class: "scroll" }, el("table", {}, names.length > 0 ? el("thead", {}, cells("th", names)) : "", el("tbody", {}, rows.map((row) => cells("td", row)))));
}

const card = (title, rows, names) => rows.length > 0 && el("div", { class: "card" }, el("h3", {}, title), table(rows, names));
const fold = (title, inner) => inner && el("details", { class: "card" }, el("summary", {}, title), inner);
const pairs = (object) => Object.entries(object).filter(([, value]) => typeof value !== "object" || value === null);
const put = (id, children) => byId(id).append(...children.filter(Boolean));

put("head", head());
put("tiles", tiles());
drawCurves(byId("curves"), steps.map((step, index) => ({ step, metrics: Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, values[index]])) })), evaluations, null);
drawMemory(byId("memory"), memory);
put("tables", [card("Mean seconds per step", seconds()), card("Groups", groups()), card("Samples by lag", lags(), ["lag, in steps", "samples", "share"])]);
drawRollouts(byId("rollouts"), rollouts, false);
put("records", [
  fold("summary", pairs(summary).length > 0 && table(pairs(summary))),
  fold("versions", summary.versions && table(Object.entries(summary.versions))),
  fold("your functions", functions().length > 0 && table(functions(), ["function", "after version", "SHA-256 of its source file"])),
  fold("events", events.length > 0 && table(events.map((event) => [Number.isFinite(event.at_s) ? clock(event.at_s) : "", event.source ?? "", event.name ?? "", event.detail ?? ""]), ["time", "from", "event", "what"])),
  fold("settings", settings && el("pre", {}, settings)),
]);

// The table behind a chart, for those who cannot see or point at it: the values that it is drawn of.

import { el } from "./dom.js";

/** Titles of the tables that are unfolded, with how far each is scrolled: charts are drawn again while a run goes on. */
const unfolded = new Map();

/** Return a folded table of the values of `chart` (charts.js), newest first: of buckets the last, the minimum and the maximum. */
export function valuesOf(title, chart) {
  const rows = el("div", { class: "rows", tabindex: "0", role: "region", "aria-label": `Values of ${title}`, "data-key": `rows-${title}`, onscroll: () => unfolded.set(title, rows.scrollTop) });
  const details = el("details", { class: "values", open: unfolded.has(title), ontoggle: () => {
    if (!details.isConnected) return; // drawn again
    if (details.open) unfold();
    else unfolded.delete(title);
  } }, el("summary", { "data-key": `values-${title}` }, "Values"), rows);
  const unfold = () => {
    if (rows.firstChild === null) rows.append(tableOf(chart.values));
    if (!unfolded.has(title)) unfolded.set(title, 0);
  };
  if (details.open) {
    unfold();
    requestAnimationFrame(() => { rows.scrollTop = unfolded.get(title) ?? 0; });
  }
  return details;
}

function tableOf({ unit, steps, series, bands }) {
  const columns = [
    ...series.flatMap(({ name, last, low, high }) => [[name, last], ...(low ? [[`${name}, minimum`, low], [`${name}, maximum`, high]] : [])]),
    ...bands.flatMap(({ name, low, high }) => [[`${name}, low`, low], [`${name}, high`, high]]),
  ].filter(([, values]) => values.some(Number.isFinite));
  const cell = (value) => el("td", { class: "number" }, Number.isFinite(value) ? String(Number(value.toPrecision(6))) : "–");
  return el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, unit), columns.map(([name]) => el("th", { class: "number", scope: "col" }, name)))),
    el("tbody", {}, steps.map((step, index) => el("tr", {}, el("th", { scope: "row" }, Number(step.toFixed(1)).toLocaleString("en")), columns.map(([, values]) => cell(values[index])))).toReversed()));
}

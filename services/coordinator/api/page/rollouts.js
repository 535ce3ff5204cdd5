// Groups to read: one line a completion, which unfolds. All of it is the run's text, and goes in as text.

import { el, figure, redraw } from "./dom.js";
import { readable } from "./tokens.js";

/** The replica of groups that nobody generated (services/coordinator/admission/demonstrations.py). */
const DEMONSTRATIONS = "demonstrations";
/** Characters of a completion in its line; the rest is read when it is unfolded. */
export const TAIL = 200;
const NEWEST = "newest first";

/** How a person sorts and filters what is loaded; kept while groups come and go. */
const order = { by: NEWEST, down: true, field: "reward", from: "", to: "" };
const open = new Set();

/**
 * Show `groups` (GET /v1/run/rollouts, newest first). `whole(group)` returns a group with whole texts, `tokens(group, completion,
 * first)` tokens of a group that has them; `showProblem` shows a problem's groups of all versions; what `search` says is marked;
 * `none` is said where there is no group.
 */
export function drawRollouts(node, groups, { whole = async (group) => group, tokens, showProblem = null, search = "", none = "no steps yet" } = {}) {
  const reader = { whole, tokens, showProblem, search, none };
  const again = () => { node.drawnFrom = undefined; drawRollouts(node, groups, reader); };
  redraw(node, [none, search, groups.map((group) => group.id)], () => {
    if (groups.length === 0) return el("p", { class: "card soft" }, none);
    const scorers = [...new Set(groups.flatMap((group) => group.completions.flatMap((one) => Object.keys(one.scores))))];
    const fields = fieldsOf(scorers);
    const rows = groups.flatMap((group) => alike(group.completions).map((same) => ({ group, one: same[0], times: same.length })));
    const shown = sorted(rows.filter((row) => passes(row, fields)), fields);
    const columns = ["reward", ...scorers, "tokens"];
    const body = shown.flatMap((row, index) => [
      order.by === NEWEST && row.group !== shown[index - 1]?.group ? heading(row.group, columns.length + 3, search, showProblem) : "",
      ...lineOf(row, scorers, reader),
    ]);
    const sorting = (name) => el("th", { class: name === "completion" ? "" : "number", "aria-sort": order.by !== name ? "none" : order.down ? "descending" : "ascending" },
      name === "completion" ? name : el("button", { type: "button", class: "plain", "data-key": `sort-${name}`, onclick: () => { Object.assign(order, { by: name, down: order.by !== name || !order.down }); again(); } }, name, order.by === name ? (order.down ? " ↓" : " ↑") : ""));
    return [filterOf(Object.keys(fields), shown.length, rows.length, again),
      el("div", { class: "card scroll" }, el("table", { class: "lines" }, el("thead", {}, el("tr", {}, el("td", {}), el("th", { class: "number" }, "times"), columns.map(sorting), sorting("completion"))), el("tbody", {}, body)))];
  });
}

/** What a completion is sorted and filtered by. */
const fieldsOf = (scorers) => ({
  reward: ({ one }) => one.reward, tokens: ({ one }) => one.tokens,
  version: ({ one }) => Math.max(...one.versions), step: ({ group }) => group.step,
  ...Object.fromEntries(scorers.map((name) => [name, ({ one }) => (one.scores[name]?.status === "ok" ? one.scores[name].value : null)])),
});

function passes(row, fields) {
  const value = fields[order.field]?.(row) ?? null;
  return (order.from === "" || (value !== null && value >= Number(order.from))) && (order.to === "" || (value !== null && value <= Number(order.to)));
}

function sorted(rows, fields) {
  const value = fields[order.by];
  if (value === undefined) return rows;
  const sign = order.down ? -1 : 1, of = (row) => value(row) ?? -sign * Infinity; // without a value: last
  return rows.toSorted((a, b) => (of(a) === of(b) ? 0 : sign * (of(a) - of(b))));
}

function filterOf(names, shown, all, again) {
  const input = (name, label) => el("input", { type: "number", step: "any", "aria-label": label, value: order[name], "data-key": `filter-${name}`, onchange: (event) => { order[name] = event.target.value; again(); } });
  const select = el("select", { "aria-label": "Field to filter by", "data-key": "filter-field", onchange: (event) => { order.field = event.target.value; again(); } }, names.map((name) => el("option", { selected: name === order.field }, name)));
  return el("p", { class: "soft filter" }, "Only where ", select, " is from ", input("from", "From"), " to ", input("to", "To"), ` · ${shown} of ${all} loaded completions `,
    order.by === NEWEST ? "" : el("button", { type: "button", class: "quiet", onclick: () => { order.by = NEWEST; again(); } }, "By group"));
}

function heading(group, columns, search, showProblem) {
  const rewards = group.completions.map((one) => one.reward ?? 0), isShown = group.replica === DEMONSTRATIONS;
  const versions = [...new Set(group.completions.flatMap((one) => one.versions))].toSorted((a, b) => a - b);
  const about = isShown ? "shown" : `v${versions.join(", v")} · mean reward ${figure(rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length)}`;
  return el("tr", { class: "group" }, el("th", { colspan: columns, scope: "rowgroup" }, el("div", { class: "stay" }, `step ${figure(group.step)} · ${about} · `, marked(askedOf(group.prompt).slice(-TAIL), search), " ",
    showProblem === null ? "" : el("button", { type: "button", class: "plain soft", onclick: () => showProblem(group.row_id) }, "This problem in all versions"))));
}

/** Completions of one text and reward share a line; of texts that are cut, nothing is known of the rest. */
function alike(completions) {
  const rows = new Map();
  for (const [index, one] of completions.entries()) {
    const sign = JSON.stringify([one.text, one.tokens, one.reward, one.scores, one.characters > one.text.length ? index : null]);
    rows.set(sign, [...(rows.get(sign) ?? []), one]);
  }
  return [...rows.values()];
}

/** What a completion is that nothing scored: of a pair, the better one is recorded with reward 1. */
function worthOf(one, { replica, completions }) {
  if (replica !== DEMONSTRATIONS) return null;
  if (completions.length === 1) return "demonstration";
  return one.reward > 0 ? "chosen" : "rejected";
}

/** A completion's line and, if it is open, the row below with all that is recorded of it. */
function lineOf({ group, one, times }, scorers, reader) {
  const place = group.completions.indexOf(one), key = `${group.id}-${place}`, worth = worthOf(one, group);
  const tail = `${one.characters > one.text.length ? "… " : ""}${one.text.slice(-TAIL)}`.replaceAll(/\s+/g, " ");
  const detail = el("tr", { class: "detail", hidden: !open.has(key) }, el("td", { colspan: scorers.length + 5 }));
  const fill = async () => {
    if (detail.hidden || detail.firstChild.childElementCount > 0) return;
    const read = one.characters > one.text.length || (one.ended && one.turns.length === 0) ? await reader.whole(group).catch((problem) => ({ unread: problem.message })) : group;
    detail.firstChild.replaceChildren(...(read.unread ? [el("p", { class: "bad" }, read.unread)] : [wholeOf(read, place, reader)]));
  };
  const toggle = el("button", { type: "button", class: "plain", "aria-expanded": String(open.has(key)), "aria-label": "Unfold", "data-key": `unfold-${key}`, onclick: () => {
    detail.hidden = !detail.hidden;
    open[detail.hidden ? "delete" : "add"](key);
    toggle.setAttribute("aria-expanded", String(!detail.hidden));
    toggle.textContent = detail.hidden ? "▸" : "▾";
    fill();
  } }, open.has(key) ? "▾" : "▸");
  fill();
  const line = el("tr", {}, el("td", {}, toggle), el("td", { class: "number" }, String(times)),
    worth ? el("td", { class: worth === "rejected" ? "bad" : "good" }, worth) : el("td", { class: `number ${one.reward > 0 ? "good" : "bad"}` }, figure(one.reward)),
    scorers.map((name) => el("td", { class: "number", title: one.scores[name]?.detail }, scoreOf(one.scores[name]))),
    el("td", { class: "number" }, figure(one.tokens)), el("td", { class: "text tail" }, marked(tail, reader.search)));
  return [line, detail];
}

const scoreOf = (score) => (score === undefined ? "" : score.status === "ok" ? figure(score.value) : score.status);

/** A message of an episode, and what is known of it. */
function messageOf(turn, search) {
  const seconds = Number.isFinite(turn.seconds) ? `${figure(turn.seconds)} s` : "";
  const about = turn.turn === null
    ? [turn.role, "given, not trained", seconds && `${seconds} since the answer before`]
    : [`${turn.role}, turn ${turn.turn + 1}`, `v${turn.versions.join(", v")}`, `${figure(turn.tokens)} tokens`, seconds, Number.isFinite(turn.reward) ? `reward ${figure(turn.reward)}` : ""];
  const branch = turn.fork ? el("p", { class: "bad" }, `a branch${turn.after === null ? "" : ` after turn ${turn.after + 1}`}: ${turn.fork === "history" ? "other messages than were sent" : "the template writes earlier messages otherwise"}`) : "";
  return [branch, el("p", { class: "soft" }, about.filter(Boolean).join(" · ")),
    turn.reasoning ? el("pre", { class: "text soft", tabindex: "0" }, marked(turn.reasoning, search)) : "",
    turn.content ? el("pre", { class: "text", tabindex: "0" }, marked(turn.content, search)) : "",
    turn.calls.map((call) => el("pre", { class: "text", tabindex: "0" }, marked(`${call.name}(${call.arguments})`, search)))];
}

/** Everything recorded of one completion: of an episode, its messages. */
function wholeOf(group, place, { tokens, showProblem, search }) {
  const one = group.completions[place], turns = one.turns?.length ? one.turns : [];
  const cut = one.ended ? `, ended: ${one.ended}` : one.finish_reason === "length" ? ", cut at the limit" : "";
  const text = (turns.length ? turns.map((turn) => messageOf(turn, search)) : [el("p", { class: "soft" }, "completion"), el("pre", { class: "text", tabindex: "0" }, marked(one.text, search))]).flat(2).filter((node) => node !== "");
  return el("div", { class: "whole stay" },
    el("p", { class: "soft" }, `step ${figure(group.step)}, group ${group.group}, ${group.problem}, by ${group.replica}, v${one.versions.join(", v")}: ${figure(one.tokens)} tokens${cut} `,
      showProblem === null ? "" : el("button", { type: "button", class: "quiet", onclick: () => showProblem(group.row_id) }, "This problem in all versions")),
    Object.entries(one.scores).map(([name, score]) => el("p", { class: "soft" }, `${name} ${scoreOf(score)}${score.detail ? `: ${score.detail}` : ""}`)),
    el("p", { class: "soft" }, "prompt"), el("pre", { tabindex: "0" }, marked(askedOf(group.prompt), search)),
    group.answer === null ? "" : [el("p", { class: "soft" }, "answer"), el("pre", { tabindex: "0" }, marked(group.answer, search))],
    group.has_tokens ? readable(text, (first) => tokens(group, place, first)) : text,
    one.characters > one.text.length ? el("p", { class: "soft" }, `${figure(one.characters - one.text.length)} characters of it are left out; rollouts.jsonl has all.`) : "");
}

/** Return `text` with each occurrence of `search` marked. */
function marked(text, search) {
  if (search === "") return text;
  const parts = [], low = text.toLowerCase(), sought = search.toLowerCase();
  let at = 0;
  for (let hit = low.indexOf(sought); hit >= 0 && low.length === text.length; hit = low.indexOf(sought, at)) {
    parts.push(text.slice(at, hit), el("mark", {}, text.slice(hit, hit + search.length)));
    at = hit + search.length;
  }
  return [...parts, text.slice(at)];
}

function askedOf(prompt) {
  if (!Array.isArray(prompt)) return String(prompt ?? "");
  return prompt.map((turn) => `${turn.role}: ${typeof turn.content === "string" ? turn.content : JSON.stringify(turn.content)}`).join("\n");
}

// Groups to read: what was asked, what was answered, what it scored. All of it is the run's text, and goes in as text.

import { el, figure, redraw } from "./dom.js";

/** Show `groups` (GET /v1/run/rollouts, newest first), the first of them open; what a person opened of `held` ones stays open.
    `showProblem` shows a problem's groups of all versions. */
export function drawRollouts(node, groups, held, showProblem = null, none = "no steps yet") {
  redraw(node, [none, ...groups.map((group) => group.id)], () => {
    if (groups.length === 0) return el("p", { class: "card soft" }, none);
    const folds = new Map(held ? [...node.querySelectorAll("details")].map((one) => [one.dataset.key, one.open]) : []);
    return groups.map((group, index) => groupOf(group, folds.get(group.id) ?? (!held && index === 0), showProblem));
  });
}

function groupOf(group, open, showProblem) {
  const rewards = group.completions.map((one) => one.reward ?? 0);
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
  const asked = askedOf(group.prompt);
  const versions = [...new Set(group.completions.flatMap((one) => one.versions))].toSorted((a, b) => a - b);
  return el("details", { class: "card", open, "data-key": group.id },
    el("summary", {}, `step ${figure(group.step)} · v${versions.join(", v")} · mean reward ${figure(mean)} · ${asked.slice(0, 80)}`),
    el("p", { class: "soft" }, `asked (${group.problem}, by ${group.replica})`), el("pre", {}, asked),
    showProblem === null ? "" : el("p", {}, el("button", { type: "button", class: "quiet", onclick: (event) => { event.stopPropagation(); showProblem(group.row_id); } }, "This problem in all versions")),
    group.answer === null ? "" : [el("p", { class: "soft" }, "answer"), el("pre", {}, group.answer)],
    el("div", { class: "scroll" }, el("table", {},
      el("thead", {}, el("tr", {}, el("th", { class: "number" }, "reward"), el("th", { class: "number" }, "times"), el("th", {}, "completion"), el("th", {}, "scores"))),
      el("tbody", {}, alike(group.completions).map(row)))));
}

/** Completions of one text and reward share a row. */
function alike(completions) {
  const rows = new Map();
  for (const one of completions) {
    const sign = JSON.stringify([one.text, one.reward, one.scores]);
    rows.set(sign, [...(rows.get(sign) ?? []), one]);
  }
  return [...rows.values()];
}

function row(same) {
  const [one] = same;
  const cut = one.finish_reason === "length" ? ", cut at the limit" : "";
  return el("tr", {},
    el("td", { class: `number ${one.reward > 0 ? "good" : "bad"}` }, figure(one.reward)),
    el("td", { class: "number" }, String(same.length)),
    el("td", { class: "text", title: `${one.tokens} tokens${cut}, by v${one.versions.join(", v")}` }, one.text),
    el("td", { class: "soft" }, Object.entries(one.scores).map(([name, score]) => el("div", { title: score.detail }, scoreOf(name, score)))));
}

const scoreOf = (name, score) => `${name} ${score.status === "ok" ? figure(score.value) : score.status}`;

function askedOf(prompt) {
  if (!Array.isArray(prompt)) return String(prompt ?? "");
  return prompt.map((turn) => `${turn.role}: ${typeof turn.content === "string" ? turn.content : JSON.stringify(turn.content)}`).join("\n");
}

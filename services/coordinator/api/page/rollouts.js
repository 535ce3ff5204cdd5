// Groups to read: what was asked, what was answered, what it scored. All of it is the run's text, and goes in as text.

import { el, figure, redraw } from "./dom.js";

/** The replica of groups that nobody generated (services/coordinator/admission/demonstrations.py). */
const DEMONSTRATIONS = "demonstrations";

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
  const isShown = group.replica === DEMONSTRATIONS;
  const rewards = group.completions.map((one) => one.reward ?? 0);
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
  const asked = askedOf(group.prompt);
  const versions = [...new Set(group.completions.flatMap((one) => one.versions))].toSorted((a, b) => a - b);
  return el("details", { class: "card", open, "data-key": group.id },
    el("summary", {}, `step ${figure(group.step)} · ${isShown ? "shown" : `v${versions.join(", v")} · mean reward ${figure(mean)}`} · ${asked.slice(0, 80)}`),
    el("p", { class: "soft" }, isShown ? `prompt (${group.problem})` : `asked (${group.problem}, by ${group.replica})`), el("pre", {}, asked),
    showProblem === null ? "" : el("p", {}, el("button", { type: "button", class: "quiet", onclick: (event) => { event.stopPropagation(); showProblem(group.row_id); } }, "This problem in all versions")),
    group.answer === null ? "" : [el("p", { class: "soft" }, "answer"), el("pre", {}, group.answer)],
    el("div", { class: "scroll" }, el("table", {},
      el("thead", {}, el("tr", {}, el("th", { class: "number" }, isShown ? "" : "reward"), el("th", { class: "number" }, "times"), el("th", {}, "completion"), el("th", {}, "scores"))),
      el("tbody", {}, alike(group.completions).map((same) => row(same, isShown && worthOf(same[0], group.completions)))))));
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

/** What a completion is that nothing scored: of a pair, the better one is recorded with reward 1. */
function worthOf(one, completions) {
  if (completions.length === 1) return "demonstration";
  return one.reward > 0 ? "chosen" : "rejected";
}

function row(same, worth) {
  const [one] = same;
  const cut = one.finish_reason === "length" ? ", cut at the limit" : "";
  return el("tr", {},
    worth ? el("td", { class: worth === "rejected" ? "bad" : "good" }, worth) : el("td", { class: `number ${one.reward > 0 ? "good" : "bad"}` }, figure(one.reward)),
    el("td", { class: "number" }, String(same.length)),
    el("td", { class: "text", title: `${one.tokens} tokens${cut}, by v${one.versions.join(", v")}` }, one.text),
    el("td", { class: "soft" }, Object.entries(one.scores).map(([name, score]) => el("div", { title: score.detail }, scoreOf(name, score)))));
}

const scoreOf = (name, score) => `${name} ${score.status === "ok" ? figure(score.value) : score.status}`;

function askedOf(prompt) {
  if (!Array.isArray(prompt)) return String(prompt ?? "");
  return prompt.map((turn) => `${turn.role}: ${typeof turn.content === "string" ? turn.content : JSON.stringify(turn.content)}`).join("\n");
}

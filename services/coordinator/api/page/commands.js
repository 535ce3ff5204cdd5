// What a person may do to the run as a whole: each asks first, and says what will happen.

import { forgetToken, keepToken, Problem, post } from "./api.js";
import { ask, choice, field } from "./dialog.js";
import { el, figure } from "./dom.js";

const REASON = () => field("reason", "Reason, shown with the run's state.");

export const start = (run, done) => steer("start", "Start the run?", [
  el("p", {}, `Problems are admitted, and training begins at step ${figure(run.step)} of ${figure(run.steps)}.`),
], "Start", done);

export const resume = (run, done) => steer("resume", "Resume the run?", [
  el("p", {}, `It continues exactly where it was paused, at step ${figure(run.step)}.`),
], "Resume", done);

export const pause = (run, done) => steer("pause", "Pause the run?", [
  el("p", {}, `No more groups are admitted. ${figure(run.groups_in_flight)} groups in flight end, and those that fill a step are trained on. Nothing is lost.`),
  choice("mode", [
    ["admission", "Pause at once"],
    ["drain", "Pause, and report when generation and scoring have finished"],
  ]),
], "Pause", done);

export const stop = (run, done) => steer("stop", "Stop the run for good?", [
  el("p", {}, `It ends at step ${figure(run.step)} of ${figure(run.steps)} and cannot be resumed. ${figure(run.groups_in_flight)} groups in flight are dropped, and counted. Summary and report are written.`),
], "Stop for good", done, true);

/** Take the run back to `target`; `policies` tell what that revokes. */
export function rollBack(target, policies, run, done) {
  const later = policies.filter((one) => one.version > target.version && one.state !== "revoked");
  const next = Math.max(...policies.map((one) => one.version)) + 1;
  const lost = later.length === 0 ? "No version is revoked." : `${later.length} version${later.length > 1 ? "s are" : " is"} revoked (v${later[0].version} to v${later.at(-1).version}), for good; what they generated is dropped.`;
  return ask({
    title: `Roll back to version ${target.version}?`,
    danger: true,
    yes: "Roll back",
    body: [
      el("p", {}, "At once:"),
      el("ul", {},
        el("li", {}, lost),
        el("li", {}, `Weights, optimizer and place in the dataset go from step ${figure(run.step)} back to step ${figure(target.step)}.`),
        el("li", {}, `These weights become version ${next}, which every rollout replica pulls; the run continues from there${run.state === "paused" ? " when it is resumed" : ""}.`)),
      REASON(),
    ],
    act: (form) => told(`v1/policies/${target.version}/rollback`, { reason: form.get("reason") }, done),
  });
}

/** Ask for a token, and keep it in this tab. Rejects when the person gives none. */
export async function askToken(status, refused) {
  forgetToken();
  const found = await ask({
    title: status === 403 ? "A token that may operate" : "A token, please",
    yes: "Use it",
    body: [
      refused === "" ? "" : el("p", { class: "bad", role: "alert" }, refused),
      el("p", {}, status === 403 ? "The token of this tab may only read." : "This coordinator asks for a bearer token."),
      el("p", { class: "soft" }, "`penstock page` prints a link that needs no token. The token is the first line of the file token in the run's folder, or of the one that coordinator.token_file names, and is kept in this tab until you close it."),
      field("token", "Token", { type: "password", required: true, minlength: 16 }),
    ],
    act: async (form) => { keepToken(form.get("token").trim()); return true; },
  });
  if (found === null) throw new Problem(status, "no token was given: reload the page, or open a new link of `penstock page`");
}

/** Ask whether to do one thing to a version, a replica or a dead letter. With `why` a reason is asked for, too. */
export const confirm = ({ title, sentence, yes, path, done, why = false, danger = false, body = {} }) => ask({
  title, yes, danger,
  body: [el("p", {}, sentence), why ? field("reason", "Reason, recorded with the event.") : ""],
  act: (form) => told(path, why ? { ...body, reason: form.get("reason") } : body, done),
});

function steer(name, title, body, yes, done, danger = false) {
  return ask({
    title, yes, danger, body: [...body, REASON()],
    act: (form) => told(`v1/run/${name}`, { reason: form.get("reason"), ...(name === "pause" ? { mode: form.get("mode") } : {}) }, done),
  });
}

async function told(path, body, done) {
  const answer = await post(path, body);
  await done();
  return answer;
}

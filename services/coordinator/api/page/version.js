// One version: what is known of it, and what a person may do with it.

import { confirm, rollBack } from "./commands.js";
import { facts, show } from "./dialog.js";
import { clock, figure } from "./dom.js";

/** Whether the run can be taken back to a version. */
export const canGoBack = (one, runState) => one.checkpoint !== null && one.state !== "revoked" && !["stopped", "finished"].includes(runState);

/** Show version `one`; `policies` are all of them. */
export function showVersion(one, policies, run, done) {
  const commands = [];
  if (run.recorded) return show({ title: `Version ${one.version}`, body: facts(factsOf(one)), commands });
  if (canGoBack(one, run.state)) commands.push(["Roll back…", () => rollBack(one, policies, run, done)]);
  if (one.pinned) commands.push(["Unpin…", () => unpin(one, done)]);
  else if (one.checkpoint !== null) commands.push(["Pin…", () => pin(one, done)]);
  if (one.released) commands.push(["Withdraw…", () => withdraw(one, done)]);
  else if (one.state !== "revoked") commands.push(["Release…", () => release(one, done)]);
  if (one.state !== "revoked" && (one.checkpoint !== null || one.location !== "" || one.version === 0)) commands.push(["Export…", () => exportIt(one, done)]);
  return show({ title: `Version ${one.version}`, body: facts(factsOf(one)), commands });
}

const factsOf = (one) => [
  ["state", [one.state, one.pinned ? "pinned" : "", one.released ? "released" : ""].filter(Boolean).join(", ")],
  ["parent", one.parent === null ? "none" : `version ${one.parent}`],
  ["step", figure(one.step)],
  ["made at", clock(one.created_at_s)],
  ["checkpoint", one.checkpoint ?? "none"],
  ["snapshot", one.location],
  ["live settings", `revision ${one.settings_revision}`],
  ...one.evaluations.map((made) => [made.set, `${figure(made.accuracy)} (${figure(made.accuracy_low)} to ${figure(made.accuracy_high)}) of ${made.answered} problems`]),
  ...Object.entries(one.metrics).map(([name, value]) => [name.replaceAll("_", " "), figure(value)]),
];

const mark = (one, word, done, title, sentence, yes) => confirm({ title, sentence, yes, path: `v1/policies/${one.version}/${word}`, done });
const pin = (one, done) => mark(one, "pin", done, `Pin version ${one.version}?`, "Cleanup leaves its checkpoint, so that the run can be taken back to it. It takes room until it is unpinned.", "Pin");
const unpin = (one, done) => mark(one, "unpin", done, `Unpin version ${one.version}?`, "The next cleanup may delete its checkpoint.", "Unpin");
const release = (one, done) => mark(one, "release", done, `Release version ${one.version}?`, "It is marked as one that people may use. Nothing else changes.", "Release");
const withdraw = (one, done) => mark(one, "withdraw", done, `Withdraw version ${one.version}?`, "It is no longer marked as one that people may use.", "Withdraw");
const exportIt = (one, done) => mark(one, "export", done, `Export version ${one.version}?`, "The trainer writes it in Hugging Face form to the run's folder, beside its steps. “Under way” says how far that is, and where it lies.", "Export");

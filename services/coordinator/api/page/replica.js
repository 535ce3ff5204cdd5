// One replica: how it is, and what a person may tell it.

import { confirm } from "./commands.js";
import { facts, show } from "./dialog.js";
import { clock, figure } from "./dom.js";
import { doing } from "./flow.js";

const TAKING = ["rollout", "reward"];

/** Show replica `one` (of GET /v1/services). */
export function showReplica(one, done) {
  const commands = [];
  if (TAKING.includes(one.service)) {
    if (one.cordon === null) commands.push(["Cordon…", () => cordon(one, done)]);
    else commands.push(["Uncordon…", () => uncordon(one, done)]);
    if (one.cordon !== "draining") commands.push(["Drain…", () => drain(one, done)]);
  }
  return show({ title: one.replica, body: facts(factsOf(one)), commands });
}

const factsOf = (one) => [
  ["service", one.service],
  ["state", one.cordon === null ? one.state : `${one.state}, ${one.cordon}`],
  ["activity", doing(one)],
  ["takes new work", one.taking ? "yes" : "no"],
  ["version", one.version === null ? "" : `${one.version}${one.versions_behind ? `, ${one.versions_behind} behind the head` : ""}`],
  ["last error", one.last_error],
  ["process", `${one.pid} on ${one.host}`],
  ["metrics at", one.address],
  ["since", clock(one.started_at_s)],
  ["starts", figure(one.starts)],
  ["memory", `${figure(one.memory_bytes / 2 ** 20)} MiB`],
  ["live settings", `revision ${one.settings_revision}`],
  ...Object.entries(one.values).map(([name, value]) => [name.replaceAll("_", " "), figure(value)]),
];

const tell = (one, word, done, title, sentence, yes) => confirm({ title, sentence, yes, path: `v1/services/${encodeURIComponent(one.replica)}/${word}`, done, why: true });
const cordon = (one, done) => tell(one, "cordon", done, `Cordon ${one.replica}?`, "It finishes its work, takes nothing new, and keeps running.", "Cordon");
const uncordon = (one, done) => tell(one, "uncordon", done, `Uncordon ${one.replica}?`, "It takes work again.", "Uncordon");
const drain = (one, done) => tell(one, "drain", done, `Drain ${one.replica}?`, "It finishes its work and exits. Its supervisor decides whether it restarts.", "Drain");

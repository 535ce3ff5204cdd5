// The four services and the streams between them: rates, backlogs, replicas, lag.

import { duration, el, figure, redraw, svg } from "./dom.js";

const WINDOW_S = 15;
const SHOWN_REPLICAS = 4;
let seen = [];
/** Services of which all replicas are shown. */
const unfolded = new Set();

/** Show the flow of `run` (GET /v1/run) through `services` (GET /v1/services); `look(replica)` is called by a replica's button. */
export function drawFlow(node, run, services, maxLag, look) {
  const stage = (name, replicas, rows) => stageOf(name, replicas, rows, look, () => drawFlow(node, run, services, maxLag, look));
  const rates = ratesOf(run);
  const of = (name) => services.filter((one) => one.service === name);
  redraw(node, [run.step, run.streams, run.last, run.head, run.drawn_tokens_per_s, rates, services.map(signs), maxLag, run.state, run.slots, run.cursor, [...unfolded]], () => [
    stage("coordinator", of("coordinator"), [
      pair("in flight", `${run.groups_in_flight} of ${run.slots}`),
      pair("admitted", figure(run.cursor)),
      pair("admitted a second", figure(rates.admitted)),
    ]),
    pipe("prompts", run, rates.admitted),
    stage("rollout", of("rollout"), [
      pair("a group takes", seconds(run.last.generate_s_mean)),
      pair("tokens drawn a second", figure(run.drawn_tokens_per_s)),
    ]),
    pipe("rollouts", run, rates.generated),
    stage("reward", of("reward"), [pair("a group takes", seconds(run.last.score_s_mean))]),
    pipe("experience", run, rates.scored),
    stage("trainer", of("trainer"), [
      pair("a step takes", seconds(run.last.step_s)),
      pair("of that, waiting", seconds(run.last.phase_wait_s)),
      pair("lag, mean", maxLag === null ? figure(run.last.lag_mean) : `${figure(run.last.lag_mean)} of ${maxLag}`),
      pair("groups a second", figure(rates.trained)),
    ]),
  ]);
}

/** Groups a second past each point, over the last seconds: what was admitted less what still lies before that point. */
function ratesOf(run) {
  const entries = (name) => run.streams[name]?.entries ?? 0;
  const generated = run.cursor - entries("prompts"), scored = generated - entries("rollouts");
  const now = { atS: performance.now() / 1000, admitted: run.cursor, generated, scored, trained: run.counts.trained ?? 0 };
  if (seen.length > 0 && now.admitted < seen.at(-1).admitted) seen = []; // the run was taken back
  seen.push(now);
  while (now.atS - seen[0].atS > WINDOW_S) seen.shift();
  const past = now.atS - seen[0].atS;
  const rate = (name) => (past < 1 ? null : Math.max(0, Number(((now[name] - seen[0][name]) / past).toPrecision(2))));
  return { admitted: rate("admitted"), generated: rate("generated"), scored: rate("scored"), trained: rate("trained") };
}

const seconds = (value) => (value === null || value === undefined ? "–" : `${figure(value)} s`);
const signs = (one) => [one.replica, one.state, one.version, one.versions_behind, one.healthy, one.cordon, one.last_error, doing(one)];

function stageOf(name, replicas, rows, look, drawAgain) {
  const troubled = replicas.toSorted((a, b) => Number(a.healthy) - Number(b.healthy));
  const most = unfolded.has(name) ? Infinity : SHOWN_REPLICAS;
  const fold = () => { unfolded.has(name) ? unfolded.delete(name) : unfolded.add(name); drawAgain(); };
  return el("li", { class: "card stage" },
    el("h3", {}, el("span", {}, name), el("span", { class: "soft" }, `× ${replicas.length}`)),
    rows,
    troubled.slice(0, most).map((one) => replica(one, look)),
    replicas.length > SHOWN_REPLICAS
      ? el("button", { type: "button", class: "plain soft", "data-key": `fold-${name}`, "aria-expanded": unfolded.has(name), onclick: fold }, unfolded.has(name) ? "fewer" : `and ${replicas.length - SHOWN_REPLICAS} more`)
      : "");
}

function replica(one, look) {
  const lamp = one.cordon !== null ? "lamp held" : one.healthy ? "lamp" : "lamp off";
  const behind = one.versions_behind > 0 ? `, ${one.versions_behind} behind` : "";
  const said = one.last_error || one.cordon || doing(one) || one.state;
  return el("button", { type: "button", class: "plain replica", title: `${one.replica}: ${said}`, "data-key": `replica-${one.replica}`, onclick: () => look(one) },
    el("span", { class: lamp, role: "img", "aria-label": said }),
    el("span", {}, one.replica),
    el("span", { class: "soft" }, !one.healthy && one.last_error ? one.last_error.slice(0, 40) : one.activity || one.version === null ? doing(one) : `v${one.version}${behind}`));
}

/** What a replica does until it is ready, and for how long. */
export const doing = (one) => (one.activity ? `${one.activity} ${duration(Math.max(0, Math.floor(Date.now() / 1000 - one.activity_since_s)))}` : "");

const pair = (name, value) => el("div", { class: "pair" }, el("span", {}, name), el("b", {}, value));

function pipe(name, run, rate) {
  const depth = run.streams[name];
  const age = depth.entries > 0 ? `oldest ${duration(Math.floor(depth.oldest_age_s / 5) * 5)}` : "empty";
  const arrow = svg("svg", { viewBox: "0 0 92 14", "aria-hidden": "true" },
    svg("path", { d: "M2 7H86", class: rate > 0 && run.state === "running" ? "moving" : "" }),
    svg("path", { d: "M80 2L87 7L80 12" }));
  return el("li", { class: "pipe", title: `${name}: ${age}` },
    el("span", {}, name), el("b", {}, String(depth.entries)), el("span", {}, `${depth.pending} in hand`),
    arrow, el("span", {}, `${figure(rate)} /s`));
}

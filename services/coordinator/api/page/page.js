// The page: asks the coordinator once a second how the run is, hears its events, and hands each part what it shows.

import { enter, follow, forgetToken, get, hasToken, onToken, save } from "./api.js";
import { askToken, pause, resume, rollBack, start, stop } from "./commands.js";
import { cursorIn } from "./cursor.js";
import { drawCurves, rangeOf } from "./curves.js";
import { drawFlow } from "./flow.js";
import { drawLineage } from "./lineage.js";
import { History } from "./history.js";
import { showLetter } from "./letter.js";
import { changeSettings } from "./live.js";
import { drawMemory } from "./memory.js";
import { showReplica } from "./replica.js";
import { drawRollouts, TAIL } from "./rollouts.js";
import { showVersion } from "./version.js";
import { byId, clock, duration, el, figure, redraw, say } from "./dom.js";

const EVERY_MS = 1000, SELDOM_MS = 3000, AWAY_MS = 15000, MEMORY_MS = 30000;
const EVENTS = 100, GROUPS = 5, REPORTS = 200, POINTS = 240, LETTERS = 100;

const ROLLOUTS = `v1/run/rollouts?limit=${GROUPS}&excerpt=${TAIL}`;

const history = new History();
const shown = { run: null, at: 0, curves: null, stamp: 0, zoom: null, services: [], operations: [], letters: [], groups: [], memory: [], held: false, cursor: null, query: "", search: "", maxLag: null, revision: null };
let seldomAt = 0, memoryAt = -Infinity;

// ---------------------------------------------------------------- parts

function drawHead(run) {
  document.title = `${run.run_id}: ${run.state}, step ${run.step}`;
  say(byId("run"), run.run_id);
  const state = byId("state");
  say(state, run.state);
  state.dataset.state = run.state;
  const words = [run.activity, run.reason && run.reason !== run.activity ? run.reason : "", run.state === "running" ? run.bound : "", run.eta_s ? `about ${duration(run.eta_s)} left` : ""];
  say(byId("activity"), words.filter(Boolean).join(" · ") || "\u00a0");
  byId("progress").max = run.steps;
  byId("progress").value = run.step;
  byId("start").hidden = run.state !== "created";
  byId("pause").disabled = run.state !== "running";
  byId("resume").disabled = run.state !== "paused";
  byId("stop").disabled = byId("settings").disabled = ["stopped", "finished"].includes(run.state);
  byId("token").hidden = !hasToken();
  byId("report").hidden = !run.closed;
  document.body.classList.toggle("recorded", run.recorded);
}

function drawTiles(run) {
  const measured = run.evaluations.filter((one) => one.accuracy !== null && one.set === run.evaluations[0].set);
  const tiles = [
    ["step", `${figure(run.step)} of ${figure(run.steps)}`],
    (run.last.reward_mean ?? null) === null && Number.isFinite(run.last.loss) ? ["loss", figure(run.last.loss)] : ["mean reward", figure(run.last.reward_mean)],
    ["held-out accuracy", measured.length > 0 ? `${figure(measured[0].accuracy)} → ${figure(measured.at(-1).accuracy)}` : "–"],
    ["trained tokens / s", figure(run.tokens_per_s || null)],
    ["lag, mean / most", `${figure(run.last.lag_mean)} / ${figure(run.last.lag_max)}`],
    ["KL, nats a token", figure(run.last.kl_mean)],
    ["training time", duration(run.training_s)],
    ["live version", run.head === null ? "–" : `v${run.head}`],
  ];
  redraw(byId("tiles"), tiles, () => tiles.map(([name, value]) => el("div", { class: "card tile", title: name }, el("b", {}, value), el("span", {}, name))));
}

/** Say at the top, whole, what is wrong: what the coordinator tells, replicas that fail with their error, dead letters by cause. */
function drawNotices(run) {
  const failing = shown.services.filter((one) => !one.healthy && one.last_error), causes = causesOf(shown.letters);
  redraw(byId("notices"), [run.notices, failing.map((one) => [one.replica, one.last_error]), causes.map(({ reason, letters }) => [reason, letters.length])], () => [
    ...run.notices.filter((one) => one.about !== "dead letters").map((one) => el("p", { class: `notice ${one.level}` }, one.text)),
    ...failing.map((one) => el("p", { class: "notice error" }, el("button", { type: "button", class: "plain", onclick: () => showReplica(one, changed) }, `${one.replica}: ${one.last_error}`))),
    ...causes.map(({ reason, letters }) => el("p", { class: "notice warning" }, el("button", { type: "button", class: "plain", onclick: () => trying(() => showLetter(letters[0], changed)) }, `${figure(letters.length)}${letters.length === LETTERS ? " or more" : ""} dead letter${letters.length > 1 ? "s" : ""} of ${letters[0].stream}: ${reason}`))),
  ]);
}

/** Dead letters by stream and reason, the most frequent first. */
function causesOf(letters) {
  const causes = new Map();
  for (const one of letters) {
    const sign = `${one.stream} ${one.reason}`;
    causes.set(sign, { reason: one.reason, letters: [...(causes.get(sign)?.letters ?? []), one] });
  }
  return [...causes.values()].toSorted((a, b) => b.letters.length - a.letters.length);
}

function drawWatch() {
  const under = shown.operations.filter((one) => one.state === "running");
  const last = shown.operations[0];
  const ended = last === undefined ? "nothing" : `nothing; last: ${last.kind} ${last.state}${last.detail ? `, ${last.detail}` : ""}`;
  redraw(byId("operations"), [under, ended], () => (under.length === 0 ? el("p", { class: "soft" }, ended)
    : under.map((one) => el("p", {}, `${one.kind}: ${one.phase}${one.detail ? `, ${one.detail}` : ""}`))));
}

/** Put one event above the others; only what is new is read out to those who listen. */
function showEvent(event) {
  const list = byId("events");
  list.prepend(el("li", {}, el("time", { datetime: new Date(event.at_s * 1000).toISOString() }, clock(event.at_s)), el("b", {}, event.name), el("span", {}, event.detail)));
  while (list.childElementCount > EVENTS) list.lastElementChild.remove();
}

function draw() {
  const { run } = shown;
  drawHead(run);
  drawNotices(run);
  drawTiles(run);
  drawWatch();
  drawFlow(byId("flow"), run, shown.services, shown.maxLag, (one) => showReplica(one, changed));
  const revoked = new Set(history.policies.filter((one) => one.state === "revoked").map((one) => one.version));
  say(byId("range"), `${rangeOf(shown.curves)} Drag over a curve to zoom; click a point to read its groups.`);
  drawCurves(byId("curves"), shown.curves, run.evaluations.filter((one) => !revoked.has(one.version)), shown.maxLag, [shown.stamp, run.evaluations.length]);
  drawMemory(byId("memory"), shown.memory);
  showCursor();
  showMemoryCursor();
  drawLineage(byId("lineage"), history.policies, run.head, run.state,
    (target) => rollBack(target, history.policies, shown.run, changed), (one) => showVersion(one, history.policies, shown.run, changed));
  drawRollouts(byId("rollouts"), shown.groups, {
    whole: (group) => get(`v1/run/rollouts/${group.id}`), tokens: (group, place, first) => get(`v1/run/rollouts/${group.id}/tokens?completion=${place}&first=${first}`), search: shown.search, none: shown.query ? "no group matches" : "no steps yet",
    showProblem: (problem) => trying(() => find("problem", problem)),
  });
  byId("older").hidden = shown.cursor === null;
  byId("newest").hidden = !shown.held;
}

// ---------------------------------------------------------------- looking

async function look() {
  const run = await get("v1/run");
  const moved = run.step > (shown.curves?.last_step ?? -1) || run.step < shown.run?.step, seldom = performance.now() - seldomAt > SELDOM_MS;
  shown.run = run;
  // a bucket of many steps is not worth a look at each
  if (moved || shown.curves?.whole !== true) if (seldom || shown.curves?.width === 1 || shown.curves === null) await lookAtCurves();
  if (seldom) {
    seldomAt = performance.now();
    await lookSeldom(run);
  }
  shown.at = Date.now() / 1000;
  if (document.body.dataset.stale !== undefined) document.querySelectorAll(".acts button").forEach((button) => { button.disabled = false; });
  delete document.body.dataset.stale;
  say(byId("asof"), `as of ${clock(shown.at)}`);
  byId("main").hidden = false; // before the first answer there is nothing to see
  draw();
}

async function lookAtCurves() {
  const [from, to] = shown.zoom ?? [];
  shown.curves = await get(`v1/run/curves?points=${POINTS}${from === undefined ? "" : `&from=${Math.ceil(from)}&to=${Math.floor(to)}`}`);
  shown.stamp += 1;
}

/** Show the steps of a range, which the server samples anew; null: all. */
async function zoom(from, to) {
  shown.zoom = from === null ? null : [from, Math.max(to, from + 1)];
  byId("whole").hidden = from === null;
  await lookAtCurves();
  draw();
}

async function lookSeldom(run) {
  const isFirst = history.policies.length === 0, versions = history.readPolicies(run);
  if (isFirst) versions.then(draw, () => {}); // of a long run they are many, and the rest is worth seeing before; a failure is tried again
  const [services, operations, groups, memory] = await Promise.all([get("v1/services?limit=500"), get("v1/operations?limit=10"), shown.held ? null : get(ROLLOUTS), performance.now() - memoryAt > MEMORY_MS ? get(`v1/run/memory?limit=${REPORTS}`) : null, isFirst ? null : versions]);
  shown.services = services.items;
  shown.operations = operations.items;
  if (memory !== null) [shown.memory, memoryAt] = [memory.items.toReversed(), performance.now()];
  if (groups !== null && !shown.held) [shown.groups, shown.cursor] = [groups.items, groups.next];
  shown.letters = run.dead > 0 ? (await get(`v1/dead-letters?limit=${LETTERS}`)).items : [];
  if (!run.recorded && run.settings_revision !== shown.revision) {
    shown.maxLag = (await get("v1/run/settings")).values["algorithm.max_lag"];
    shown.revision = run.settings_revision;
  }
}

async function lookNow() {
  seldomAt = -Infinity;
  await look();
}

/** Look at once at everything that a command may have changed. */
async function changed() {
  history.forget();
  await lookNow();
}

/** Begin something that asks the coordinator first; what it answers instead is said where the run's state is. */
async function trying(work) {
  try {
    await work();
  } catch (problem) {
    say(byId("activity"), problem.message);
  }
}

async function showOlder() {
  shown.held = true;
  const page = await get(`${ROLLOUTS}&cursor=${shown.cursor}${shown.query}`);
  shown.groups = [...shown.groups, ...page.items];
  shown.cursor = page.next;
  draw();
}

/** Show the groups of one problem, with a text, or up to a step; without a value, the newest ones again. */
async function find(name, value) {
  if (value === "") return hold(false);
  shown.search = name === "search" ? value : "";
  shown.query = `&${name}=${encodeURIComponent(value)}`;
  const page = await get(`${ROLLOUTS}${shown.query}`);
  [shown.held, shown.groups, shown.cursor] = [true, page.items, page.next];
  return draw();
}

/** Let the rollouts stand still while somebody reads them, or follow the run again. */
async function hold(held) {
  shown.held = held;
  if (held) return draw();
  [shown.query, shown.search, byId("search").value] = ["", "", ""];
  return lookNow();
}

/** Keep what was last known, greyed, and say since when it is old and what to do; a run that had ended stays as it was. */
function away(problem) {
  if (hasLeft(problem)) {
    byId("report").hidden = true;
    return say(byId("activity"), "The run has ended, and so has its coordinator: `penstock page` shows its records. report.html in the run's folder has its curves and rollouts.");
  }
  const last = shown.run === null ? "" : ` · last heard at ${clock(shown.at)}, ${shown.run.state} at step ${figure(shown.run.step)}`;
  const advice = problem.status === undefined ? " · check that its process or port-forward runs; if the run has ended, report.html in its folder has the rest" : "";
  document.body.dataset.stale = "";
  say(byId("state"), problem.status === 401 ? "no token" : "no answer");
  document.title = `${byId("state").textContent}: ${shown.run?.run_id ?? "Penstock"}`;
  byId("state").dataset.state = "away";
  say(byId("activity"), `${problem.message}${last}${advice}`);
  for (const button of document.querySelectorAll(".commands button:not(#token), .acts button")) button.disabled = true;
}

/** Whether the run had ended, and its coordinator refuses connections, which a fetch tells by a TypeError. */
const hasLeft = (problem) => isOver() && problem instanceof TypeError;
const isOver = () => ["finished", "stopped"].includes(shown.run?.state);

async function lookForEver() {
  for (let isLast = false; ;) {
    let wait = document.hidden ? AWAY_MS : ["created", "paused"].includes(shown.run?.state) ? SELDOM_MS : EVERY_MS;
    try {
      await look();
      if (shown.run.closed && !isLast) {
        isLast = true; // once more, with the last evaluation and events, and no more after that
        await lookNow();
      } else if (shown.run.closed && shown.curves.whole) return say(byId("activity"), `${shown.run.reason}${shown.run.recorded ? " · read from its folder" : ""}`);
    } catch (problem) {
      away(problem);
      if (hasLeft(problem)) return undefined;
      if (problem.status === 401) wait = AWAY_MS; // the person gave no token: not at once again
    }
    await new Promise((resolve) => { setTimeout(resolve, wait); });
  }
}

async function hear() {
  const page = await get(`v1/events?limit=${EVENTS}`);
  byId("events").replaceChildren();
  page.items.toReversed().forEach(showEvent);
  if ((await get("v1/run")).recorded) return;
  await follow(page.items[0]?.id ?? "0-0", (event) => {
    showEvent(event);
    if (event.source === "rollback" || event.source === "api") history.forget();
  }, isOver);
}

const pointed = (_, pinned) => {
  byId("groups").hidden = pinned === null;
  say(byId("groups"), `Groups of step ${Math.round(pinned ?? 0)}`);
  byId("groups").value = Math.round(pinned ?? 0);
};
const showCursor = cursorIn(byId("curves"), { moved: pointed, zoom: (from, to) => trying(() => zoom(from, to)) });
const showMemoryCursor = cursorIn(byId("memory"));
onToken(askToken);
byId("groups").addEventListener("click", () => trying(async () => { await find("step", byId("groups").value); byId("h-rollouts").scrollIntoView(); }));
byId("whole").addEventListener("click", () => trying(() => zoom(null, null)));
addEventListener("resize", () => { if (shown.curves !== null) draw(); });
byId("start").addEventListener("click", () => start(shown.run, lookNow));
byId("pause").addEventListener("click", () => pause(shown.run, lookNow));
byId("resume").addEventListener("click", () => resume(shown.run, lookNow));
byId("settings").addEventListener("click", () => trying(() => changeSettings(lookNow)));
byId("stop").addEventListener("click", () => stop(shown.run, lookNow));
byId("older").addEventListener("click", () => trying(showOlder));
byId("token").addEventListener("click", () => { forgetToken(); location.reload(); });
byId("report").addEventListener("click", (event) => {
  if (!hasToken()) return; // a link is enough
  event.preventDefault();
  trying(() => save("report.html"));
});
byId("newest").addEventListener("click", () => hold(false));
byId("rollouts").addEventListener("click", () => hold(true));
byId("find").addEventListener("submit", (event) => { event.preventDefault(); trying(() => find("search", byId("search").value.trim())); });
byId("older").hidden = true;
await enter();
lookForEver();
(async () => {
  while (!isOver()) {
    try {
      await hear();
    } catch {
      await new Promise((resolve) => { setTimeout(resolve, SELDOM_MS); }); // the poll of the run says what is wrong
    }
  }
})();

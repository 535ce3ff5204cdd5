// Which curves are shown, of what.

import { COLOURS, curves, stack, widthIn } from "./charts.js";
import { el, redraw } from "./dom.js";
import { valuesOf } from "./values.js";

/** Labels of the phases of a step. */
export const PHASES = {
  phase_wait_s: "wait for experience",
  phase_proximal_s: "proximal logprobs",
  phase_reference_s: "reference logprobs",
  phase_critic_s: "critic",
  phase_forward_backward_s: "forward and backward",
  phase_optimizer_s: "optimizer",
  phase_snapshot_s: "snapshot",
  phase_commit_s: "commit",
  phase_checkpoint_s: "checkpoint",
  phase_offload_s: "memory to the host",
  phase_reload_s: "memory from the host",
};

/** Return the colour of a phase, by its name in a process's memory: that of the same phase's time. */
export function phaseColour(phase) {
  const place = Object.keys(PHASES).indexOf(`phase_${phase.replaceAll(" and ", "_")}_s`);
  return place >= 0 ? place : phase === "decode" ? 11 : COLOURS;
}

/** How the mean value of a scorer is named in a step's report. */
const SCORER = "scorer_mean_";

/** How what environments report is named there, and the share of episodes that ended in a way. */
const ENVIRONMENT = "environment_mean_", ENDED = "ended_";

const isKnown = (metrics, name) => metrics[name]?.last.some(Number.isFinite) ?? false;

/** Whether a run's steps have a loss and no rewards: it trains demonstrations or preference pairs, and generates nothing. */
export const isSupervised = (metrics) => isKnown(metrics, "loss") && !isKnown(metrics, "reward_mean");

/** [title, note, metrics, options]: one card for each; without a value of a metric, the curve is absent, and so is an empty card. */
const LEARNING = [
  ["Critic", "explained variance of returns", ["explained_variance"], { low: null }],
  ["KL to the teacher", "nats a token", ["teacher_kl"]],
  ["Replayed routes", "share of the step's tokens", ["replayed_fraction"], { high: 1 }],
  ["Imbalance of experts", "tokens of the busiest by the mean, over layers", ["expert_imbalance"], { low: null }],
];
const OF_PAIRS = [
  ["Loss", "of demonstrations or pairs; of held-out ones after the step", ["loss", "evaluation_loss"], { low: null }],
  ["Preferences", "share of pairs that the policy orders right", ["preference_accuracy", "evaluation_accuracy"], { high: 1 }],
  ["Margin", "of the chosen answer over the rejected one, in nats", ["preference_margin"], { low: null }],
];
const OF_EPISODES = [
  ["Turns of an episode", "answers of the policy, and calls of tools; means", ["episode_turns_mean", "episode_calls_mean"]],
  ["Tools and agents", "seconds of an episode between its answers", ["episode_wait_s_mean"]],
];
const OF_GENERATION = [
  ["Loss of demonstrations", "nats a token", ["ce_loss"], { low: null }],
  ["KL", "nats a token, behavior against policy", ["kl_mean"]],
  ["Lag", "in steps, of samples when used", ["lag_mean", "lag_max"]],
  ["Clipped tokens", "share of trained tokens", ["clip_fraction", "masked_fraction"]],
  ["Effective sample size", "share of trained tokens; 1 is on policy", ["ess"], { high: 1 }],
  ["Zero-variance groups", "a step's groups without signal", ["zero_std_groups"]],
  ["Groups with signal", "share of the generated groups", ["signal_fraction"], { high: 1 }],
];
const OF_ALL = [
  ["Entropy", "nats a token", ["entropy"]],
  ["Throughput", "trained tokens per second", ["tokens_per_s"]],
  ["Response length", "tokens, mean", ["response_tokens_mean"]],
  ["Gradient norm", "before clipping", ["grad_norm"]],
  ["Learning rate", "mean over the step's updates", ["learning_rate"]],
  ["Device switches", "seconds to training, and back to generation; of reward models' turns", ["switch_train_s", "switch_generate_s", "score_turn_s"]],
  ["Rung of the last switch", "0: nothing is freed, 4: everything", ["switch_rung"], { high: 4 }],
];

/** Show the curves of `view` (GET /v1/run/curves) and of `evaluations`; `stamp` changes when they do. */
export function drawCurves(node, view, evaluations, maxLag, stamp) {
  const width = widthIn(node), cards = cardsOf(view, evaluations, maxLag, width);
  const titles = cards.map(([title]) => title);
  redraw(node, [titles, titles.length === 0], () => (titles.length === 0 ? el("p", { class: "soft" }, "no step yet") : titles.map((title) => el("div", { class: "card curve", "data-curve": title }))));
  cards.forEach(([title, note, drawing], index) => redraw(node.children[index], [stamp, width], () => [el("h3", {}, title, " ", el("small", {}, note)), drawing, valuesOf(title, drawing[0])].flat()));
}

function cardsOf(view, evaluations, maxLag, width) {
  const { metrics } = view, supervised = isSupervised(metrics);
  const known = evaluations.filter((one) => one.accuracy !== null);
  const steps = [...view.step], axis = { steps, width, from: steps[0], to: steps.at(-1), marks: view.marks, evaluated: known.map((one) => one.step) };
  if (steps.length === 0 && known.length === 0) return [];
  const plain = ([title, note, names, options]) => [title, title === "Lag" && maxLag !== null ? `${note}; at most ${maxLag}` : note, curves(axis, names.filter((name) => isKnown(metrics, name)).map((name) => seriesOf(name.replaceAll("_", " "), metrics[name])), { low: 0, ...options })];
  const under = (prefix) => Object.keys(metrics).filter((name) => name.startsWith(prefix)).toSorted();
  const all = (prefix, options, isShown = () => true) => curves(axis, under(prefix).filter((name) => isShown(metrics[name].last)).map((name) => seriesOf(name.slice(prefix.length), metrics[name])), options);
  const phases = Object.entries(PHASES).map(([name, label], colour) => ({ name: label, last: metrics[name]?.last ?? steps.map(() => null), colour }));
  const cards = [
    ...OF_PAIRS.slice(supervised ? 0 : 1).map(plain),
    ...(supervised ? [] : [
      ["Reward", "of training samples: mean, one deviation, min to max", isKnown(metrics, "reward_mean") && rewards(axis, metrics)],
      ["Reward by scorer", "mean value of each reward function", all(SCORER)],
      ["Reported by environments", "mean over the episodes that report it", all(ENVIRONMENT)],
      ["Held-out accuracy", "by set; 95 % interval of the first", accuracies(axis, known)],
      ...OF_EPISODES.map(plain),
      ["How episodes end", "share of the step's episodes", all(ENDED, { low: 0, high: 1 }, (shares) => shares.some((share) => share > 0))],
      ...OF_GENERATION.map(plain),
    ]),
    ...OF_ALL.slice(0, 2).map(plain),
    ["Time per phase", "seconds of a step in the trainer", stack(axis, phases)],
    ...OF_ALL.slice(2).map(plain),
    ...LEARNING.map(plain),
    ...(isKnown(metrics, "kl_coefficient") ? [plain(["KL to the reference", "nats a token", ["reference_kl"]])] : []),
  ].filter(([, , drawing]) => drawing);
  for (const [, , [chart]] of cards) chart.keys = axis;
  return cards;
}

const seriesOf = (name, { last, low, high }) => ({ name, last, low, high });

function rewards(axis, metrics) {
  const none = axis.steps.map(() => null);
  const column = (name, side) => metrics[name]?.[side] ?? metrics[name]?.last ?? none;
  const mean = column("reward_mean", "last"), deviation = column("reward_std", "last");
  const [least, most] = [column("reward_min", "low"), column("reward_max", "high")];
  const near = (sign, bound, within) => axis.steps.map((_, index) => (mean[index] === null || deviation[index] === null ? null
    : within(bound[index] ?? sign * Infinity, mean[index] + sign * deviation[index])));
  const bands = [{ name: "min to max", low: least, high: most },
    { name: "one deviation", low: near(-1, least, Math.max), high: near(1, most, Math.min) }];
  return curves(axis, [seriesOf("mean reward", metrics.reward_mean)], { bands: bands.filter((band) => band.low.some(Number.isFinite)) });
}

function accuracies(axis, known) {
  const [from, to] = [axis.from ?? -Infinity, axis.to ?? Infinity];
  const shown = known.filter((one) => one.step === 0 || (one.step >= from && one.step <= to)).toSorted((a, b) => a.step - b.step);
  const steps = [...new Set(shown.map((one) => one.step))], sets = [...new Set(known.map((one) => one.set))];
  const of = (set, name) => steps.map((step) => shown.findLast((one) => one.set === set && one.step === step)?.[name] ?? null);
  const lines = sets.map((set) => ({ name: set, last: of(set, "accuracy"), points: true }));
  const bands = sets.slice(0, 1).map((set) => ({ name: "95 %", low: of(set, "accuracy_low"), high: of(set, "accuracy_high") })).filter((band) => band.low.some(Number.isFinite));
  return curves({ ...axis, steps, from: Math.min(axis.from ?? Infinity, steps[0] ?? 0) }, lines, { bands, low: 0, high: 1 });
}

/** Return which steps are shown, for people. */
export function rangeOf(view) {
  if (view.steps === 0) return "";
  const number = (value) => value.toLocaleString("en"), [from, to] = [view.step[0] - view.width + 1, view.step.at(-1)];
  const part = Math.max(from, view.first_step) > view.first_step || to < view.last_step ? ` of ${number(view.last_step)}` : "";
  const points = view.width > 1 ? `; a point is ${number(view.width)} steps: the line is the last value, the band minimum to maximum` : "";
  return `Steps ${number(Math.max(from, view.first_step))} to ${number(to)}${part}${points}${view.whole === false ? "; older records are being read" : ""}.`;
}

/** Return the buckets of `view` from one step to another: what a file without a server zooms to. */
export function within(view, from, to) {
  const kept = view.step.map((step, index) => [step, index]).filter(([step]) => step >= from && step <= to).map(([, index]) => index);
  const pick = (values) => values && kept.map((index) => values[index]);
  const metrics = Object.entries(view.metrics).map(([name, { last, low, high }]) => [name, { last: pick(last), low: pick(low), high: pick(high) }]);
  return { ...view, step: pick(view.step), metrics: Object.fromEntries(metrics) };
}

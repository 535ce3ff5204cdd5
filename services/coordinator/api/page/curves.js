// Which curves are shown, of what.

import { curves, stack } from "./charts.js";
import { el, redraw } from "./dom.js";

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

/** How the mean value of a scorer is named in a step's report. */
const SCORER = "scorer_mean_";

/** Whether a run's steps have a loss and no rewards: it trains demonstrations or preference pairs, and generates nothing. */
export const isSupervised = (rewards, losses) => (losses ?? []).some(Number.isFinite) && !(rewards ?? []).some(Number.isFinite);

/** Curves of what is generated and scored. */
const OF_GENERATION = new Set(["Reward", "Reward by scorer", "Held-out accuracy", "KL", "Lag", "Clipped tokens", "Effective sample size", "Zero-variance groups", "KL to the reference"]);

/** Show the curves of `reports` (GET /v1/run/steps, oldest first) and of `evaluations`. */
export function drawCurves(node, reports, evaluations, maxLag) {
  const steps = reports.map((one) => one.step);
  const column = (name) => reports.map((one) => one.metrics[name] ?? null);
  const of = (...names) => names.map((name) => ({ name: name.replaceAll("_", " "), values: column(name) }));
  const plain = (names, options = {}) => () => curves(steps, of(...names), { low: 0, ...options });
  const bound = maxLag === null ? "" : `; at most ${maxLag}`;
  const phases = Object.entries(PHASES).map(([name, label]) => ({ name: label, values: column(name) }));
  const supervised = isSupervised(column("reward_mean"), column("loss"));
  const loss = supervised ? "loss" : "ce_loss";
  const cards = [
    ["Loss", "of demonstrations or pairs; of held-out ones after the step", plain([loss, "evaluation_loss"], { low: null }), loss],
    ["Reward", "of training samples: mean, one deviation, min to max", () => rewards(steps, column)],
    ["Reward by scorer", "mean value of each scorer", () => curves(steps, scorers(reports, column))],
    ["Held-out accuracy", "by set; 95 % interval of the first", () => accuracies(evaluations)],
    ["KL", "nats a token, behavior against policy", plain(["kl_mean"])],
    ["Entropy", "nats a token", plain(["entropy"])],
    ["Lag", `in steps, of samples when used${bound}`, plain(["lag_mean", "lag_max"])],
    ["Throughput", "trained tokens per second", plain(["tokens_per_s"])],
    ["Time per phase", "seconds of a step in the trainer", () => stack(steps, phases)],
    ["Device switches", "seconds to training, and back to generation; of reward models' turns", plain(["switch_train_s", "switch_generate_s", "phase_offload_s", "phase_reload_s", "score_turn_s"]), "switch_train_s"],
    ["Rung of the last switch", "0: nothing is freed, 4: everything", plain(["switch_rung"], { high: 4 }), "switch_rung"],
    ["Response length", "tokens, mean", plain(["response_tokens_mean"])],
    ["Gradient norm", "before clipping", plain(["grad_norm"])],
    ["Learning rate", "mean over the step's updates", plain(["learning_rate"])],
    ["Clipped tokens", "share of trained tokens", plain(["clip_fraction", "masked_fraction"])],
    ["Effective sample size", "share of trained tokens; 1 is on policy", plain(["ess"], { high: 1 })],
    ["Zero-variance groups", "a step's groups without signal", plain(["zero_std_groups"])],
    ["Groups with signal", "share of the generated groups", plain(["signal_fraction"], { high: 1 }), "signal_fraction"],
    ["KL to the reference", "nats a token", plain(["reference_kl"]), "kl_coefficient"],
    ["Critic", "explained variance of returns", plain(["explained_variance"], { low: null }), "explained_variance"],
    ["Preferences", "share of pairs that the policy orders right", plain(["preference_accuracy", "evaluation_accuracy"], { high: 1 }), "preference_accuracy"],
    ["KL to the teacher", "nats a token", plain(["teacher_kl"]), "teacher_kl"],
  ];
  const sign = [reports.at(-1)?.id ?? null, reports.length, evaluations.map((one) => one.version), maxLag];
  if (node.childElementCount === 0) node.append(...cards.map(([title]) => el("div", { class: "card curve", "data-curve": title })));
  cards.forEach(([title, note, make, needed], index) => {
    const card = node.children[index];
    card.hidden = (supervised && OF_GENERATION.has(title)) || (needed !== undefined && !column(needed).some(Number.isFinite));
    if (matchMedia("(hover: hover)").matches && card.matches(":hover")) return; // somebody reads what a point was
    redraw(card, sign, () => [el("h3", {}, title, " ", el("small", {}, note)), make() ?? el("p", { class: "soft" }, "nothing yet")].flat());
  });
}

/** One series for each scorer that any report names. */
function scorers(reports, column) {
  const names = new Set(reports.flatMap((one) => Object.keys(one.metrics)).filter((name) => name.startsWith(SCORER)));
  return [...names].toSorted().map((name) => ({ name: name.slice(SCORER.length), values: column(name) }));
}

function rewards(steps, column) {
  const [mean, deviation, least, most] = ["reward_mean", "reward_std", "reward_min", "reward_max"].map(column);
  const near = (sign, bound, within) => steps.map((_, index) => (mean[index] === null || deviation[index] === null ? null
    : within(bound[index] ?? sign * Infinity, mean[index] + sign * deviation[index])));
  const bands = [{ name: "min to max", low: least, high: most },
    { name: "one deviation", low: near(-1, least, Math.max), high: near(1, most, Math.min) }];
  return curves(steps, [{ name: "mean reward", values: mean }], { bands });
}

function accuracies(evaluations) {
  const known = evaluations.filter((one) => one.accuracy !== null).toSorted((a, b) => a.step - b.step);
  const steps = [...new Set(known.map((one) => one.step))];
  const sets = [...new Set(known.map((one) => one.set))];
  const of = (set, name) => steps.map((step) => known.findLast((one) => one.set === set && one.step === step)?.[name] ?? null);
  const lines = sets.map((set) => ({ name: set, values: of(set, "accuracy"), points: true }));
  const bands = sets.slice(0, 1).map((set) => ({ name: "95 %", low: of(set, "accuracy_low"), high: of(set, "accuracy_high") }));
  return curves(steps, lines, { bands, low: 0, high: 1 });
}

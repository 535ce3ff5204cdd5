// The settings that may change during the run: a form with what is now, changed from the revision that was read.

import { getTagged, patch, Problem } from "./api.js";
import { ask, field } from "./dialog.js";
import { el } from "./dom.js";

const PATH = "v1/run/settings";
const FIELDS = [
  ["algorithm.max_lag", "Lag, at most, in steps"],
  ["trainer.learning_rate", "Learning rate, at its peak"],
  ["sampling.temperature", "Temperature"],
  ["sampling.group_size", "Completions of a prompt"],
  ["reward.expression", "Reward from the scorers' values; empty: their mean", { text: true }],
  ["weights.update", "When new weights go live", { options: ["inflight", "drain"] }],
  ["run.gpu_hours", "GPU-hours after which the run pauses; 0: no limit"],
];

/** Ask for new values; the server checks them, and says at each field what is wrong with it. */
export async function changeSettings(done) {
  let { found, tag } = await getTagged(PATH);
  const lines = FIELDS.map(([key, label, kind = {}]) => line(key, label, kind));
  const last = el("p", { class: "soft" });
  const read = () => {
    last.textContent = found.revision === 0 ? "As the run's file has them." : `Revision ${found.revision}, since step ${found.step}${found.reason ? `: ${found.reason}` : ""}.`;
    for (const one of lines) one.now(found.values[one.key]);
  };
  read();
  return ask({
    title: "Settings that may change",
    yes: "Change",
    body: [last, ...lines.map((one) => one.node), field("reason", "Reason, recorded with the change.")],
    act: async (form) => {
      const changes = Object.fromEntries(lines.filter((one) => one.changed()).map((one) => [one.key, one.value()]));
      lines.forEach((one) => one.wrong(""));
      if (Object.keys(changes).length === 0) throw new Problem(422, "nothing is changed yet");
      try {
        await patch(PATH, { changes, reason: form.get("reason") }, tag);
      } catch (problem) {
        if (problem.status !== 412) throw told(problem, lines);
        ({ found, tag } = await getTagged(PATH));
        read();
        throw new Problem(412, "the settings changed meanwhile: check the current values and confirm again");
      }
      await done();
      return true;
    },
  });
}

/** Return one field: `now` shows the value that holds, and is what is in the field until a person changes it. */
function line(key, label, { text = false, options }) {
  const id = `live-${key.replace(".", "-")}`;
  const shared = { name: key, id, "aria-describedby": `${id}-now ${id}-wrong` };
  const input = options === undefined
    ? el("input", { type: "text", inputmode: text ? "text" : "decimal", autocomplete: "off", maxlength: 1000, spellcheck: "false", ...shared })
    : el("select", shared, options.map((one) => el("option", {}, one)));
  const now = el("small", { id: `${id}-now` }), wrong = el("small", { class: "bad", id: `${id}-wrong`, role: "alert" });
  let held = null;
  const changed = () => input.value.trim() !== held;
  return {
    key,
    node: el("div", { class: "setting" }, el("label", { for: id }, label), now, input, wrong),
    changed,
    now(value) {
      const untouched = held === null || !changed();
      held = shown(value);
      if (untouched) input.value = held;
      now.textContent = `now ${held === "" ? "empty" : held}`;
    },
    value: () => (text || options !== undefined ? input.value.trim() : numberIn(input.value)),
    wrong(sentence) {
      wrong.textContent = sentence;
      input.setAttribute("aria-invalid", String(sentence !== ""));
    },
  };
}

const shown = (value) => (typeof value === "number" && value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential() : String(value));

/** A number where the text is one; else the text, so that the server says what it expected. */
const numberIn = (text) => (text.trim() !== "" && Number.isFinite(Number(text)) ? Number(text) : text);

/** Say at each field what is wrong with it; return a problem that says the rest. */
function told(problem, lines) {
  const rest = (problem.errors.length > 0 ? problem.errors : [problem.message]).filter((sentence) => {
    const one = lines.find(({ key }) => sentence.includes(key));
    one?.wrong(sentence.slice(sentence.indexOf(`${one.key}: `) < 0 ? 0 : sentence.indexOf(`${one.key}: `) + one.key.length + 2));
    return one === undefined;
  });
  return new Problem(problem.status, rest.length > 0 ? rest.join("; ") : "nothing was changed: see the messages at the fields");
}

// The tokens of a completion, coloured by probability or by the difference of trainer and engine. All of it is the run's text, and goes in as text.

import { el, figure } from "./dom.js";

const WAYS = {
  text: { name: "Text" },
  logprob: {
    name: "Logprob", about: "probability when it was sampled:", keys: ["0.9 or more", "0.5", "0.2", "0.02", "less"],
    bucketOf: ({ logprob, trainer }) => bucket(-(logprob ?? trainer), [0.1054, 0.6932, 1.6095, 3.9121]),
  },
  mismatch: {
    name: "Mismatch", about: "trainer's less engine's logprob, either way:", keys: ["up to 0.01 nats", "0.05", "0.2", "1", "more"],
    bucketOf: ({ difference }) => bucket(Math.abs(difference ?? 0), [0.01, 0.05, 0.2, 1]),
  },
};
/** How a person last chose to read completions. */
const reading = { way: "text" };

const bucket = (value, bounds) => bounds.filter((bound) => value > bound).length;
const nats = (value) => (value === null ? "–" : value.toFixed(4).replace("-", "−"));

/**
 * Return a completion to read as `plain`, its nodes, or by tokens. `read(first)` returns tokens from the index `first` on (GET
 * /v1/run/rollouts/{entry}/tokens).
 */
export function readable(plain, read) {
  const body = el("div", {}), buttons = Object.entries(WAYS).map(([way, { name }]) => el("button", { type: "button", class: "quiet", "aria-pressed": String(way === reading.way), onclick: () => choose(way) }, name));
  async function choose(way) {
    reading.way = way;
    buttons.forEach((button, index) => button.setAttribute("aria-pressed", String(Object.keys(WAYS)[index] === way)));
    if (way === "text") return body.replaceChildren(...plain);
    try {
      const nodes = coloured(await read(0), WAYS[way], read);
      if (reading.way === way) body.replaceChildren(...nodes);
    } catch (problem) {
      body.replaceChildren(el("p", { class: "bad" }, problem.message), ...plain);
    }
  }
  choose(reading.way);
  return [el("p", { class: "ways", role: "group", "aria-label": "Read the completion as" }, buttons), body];
}

function coloured(view, way, read) {
  const tokens = [], spans = [];
  const values = el("p", { class: "soft values", role: "status" }, "Point at a token, or use the arrow keys in the text, for its values.");
  const text = el("pre", { class: "text tokens", tabindex: "0", role: "group", "aria-label": `Tokens by ${way.name.toLowerCase()}` });
  const rows = el("tbody", {}), more = el("button", { type: "button", class: "quiet", onclick: readOn }, "More tokens");
  let at = -1;
  function readOn() {
    more.disabled = true;
    read(tokens.at(-1).index + 1).then(add, (problem) => { values.textContent = problem.message; }).finally(() => { more.disabled = false; });
  }
  function add(part) {
    for (const token of tokensOf(part)) {
      const isNewVersion = token.logprob !== null && token.version !== tokens.findLast((one) => one.logprob !== null)?.version;
      if (isNewVersion) text.append(el("b", { class: "since" }, `v${token.version}`));
      const span = el("span", { class: `token t${token.isTrained ? way.bucketOf(token) : "0 given"}${token.text === "" ? " empty" : token.text.startsWith("\n") ? " broken" : ""}` }, token.text);
      span.dataset.place = tokens.length;
      text.append(span);
      tokens.push(token);
      spans.push(span);
      rows.append(el("tr", {}, [token.index + 1, token.id, token.version, nats(token.logprob), nats(token.trainer), nats(token.difference)].map((cell) => el("td", { class: "number" }, String(cell))), el("td", { class: "text" }, JSON.stringify(token.text))));
    }
    more.hidden = tokens.length === 0 || tokens.at(-1).index + 1 >= part.total;
  }
  function show(place) {
    if (!(place >= 0 && place < tokens.length)) return;
    spans[at]?.classList.remove("at");
    spans[at = place].classList.add("at");
    values.textContent = wordsOf(tokens[place], view.total);
  }
  const pointed = (event) => show(Number(event.target.dataset.place ?? NaN));
  text.addEventListener("mouseover", pointed);
  text.addEventListener("click", pointed);
  text.addEventListener("keydown", (event) => {
    const place = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tokens.length - 1 }[event.key];
    if (place === undefined) return;
    event.preventDefault();
    show(place);
    spans[at]?.scrollIntoView({ block: "nearest" });
  });
  add(view);
  const names = ["token", "id", "version", "engine", "trainer", "difference"].map((name) => el("th", { class: "number" }, name));
  return [
    el("p", { class: "legend" }, el("span", {}, way.about), way.keys.map((key, index) => el("span", {}, el("span", { class: `token swatch t${index}` }, "\u00a0"), ` ${key}`)), el("span", {}, el("span", { class: "token given" }, "not trained"))),
    text, values, view.first > 0 ? el("p", { class: "soft" }, `These are the last of ${figure(view.total)} tokens.`) : "", el("p", {}, more),
    el("details", {}, el("summary", {}, "Values of each token, logprobs in nats"), el("div", { class: "rows", tabindex: "0", role: "region", "aria-label": "Values of each token" }, el("table", {}, el("thead", {}, el("tr", {}, names, el("th", {}, "text"))), rows))),
  ].filter((node) => node !== "");
}

const tokensOf = ({ first, ids, texts, logprobs, trainer_logprobs: trainers, versions }) => ids.map((id, index) => {
  const [logprob, trainer] = [logprobs[index], trainers[index]];
  return { index: first + index, id, text: texts === null ? `[${id}]` : texts[index], logprob, trainer, version: versions[index], isTrained: trainer !== null, difference: logprob === null || trainer === null ? null : trainer - logprob };
});

function wordsOf(token, total) {
  const chance = token.logprob === null ? "" : ` (probability ${figure(Math.exp(token.logprob))})`;
  const engine = token.logprob === null ? "not sampled by a policy" : `v${token.version}, engine ${nats(token.logprob)}${chance}`;
  const trainer = token.isTrained ? `trainer ${nats(token.trainer)}${token.difference === null ? "" : `, difference ${nats(token.difference)}`}` : "not trained";
  return `Token ${figure(token.index + 1)} of ${figure(total)}: ${JSON.stringify(token.text)}, id ${token.id} · ${engine} · ${trainer}`;
}

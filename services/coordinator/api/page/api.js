// The coordinator's HTTP API, as any other client uses it: docs/api.md. Knows tokens and errors, not what is shown.

const KEPT_AS = "penstock token";
const AGAIN_MS = 1000, SILENT_MS = 5000;

/** An answer that is no success; `message` says what was expected and what was found, `errors` each of several by itself. */
export class Problem extends Error {
  constructor(status, detail, errors = []) {
    super(detail);
    this.status = status;
    this.errors = errors;
  }
}

let asking = null, refused = "";
/** Asks the person for a token and keeps it; set by the page. Rejects when the person will not. */
let ask = async () => { throw new Problem(401, "no token"); };

export const onToken = (asks) => { ask = asks; };
export const hasToken = () => sessionStorage.getItem(KEPT_AS) !== null;
export const keepToken = (token) => sessionStorage.setItem(KEPT_AS, token);
export const forgetToken = () => sessionStorage.removeItem(KEPT_AS);

/** The newest answer of each path that is asked again and again, with its tag. */
const answers = new Map();
const MOST_ANSWERS = 40;

/** Return what GET `path` answers, which is not sent again where it has not changed. Throws a Problem where it is no success. */
export async function get(path) {
  const known = answers.get(path), answer = await send("GET", path, undefined, known ? { "If-None-Match": known.tag } : {});
  if (answer.status === 304) return JSON.parse(known.text);
  const text = await answer.text(), tag = answer.headers.get("ETag");
  answers.delete(path);
  if (tag !== null) answers.set(path, { tag, text });
  if (answers.size > MOST_ANSWERS) answers.delete(answers.keys().next().value);
  return JSON.parse(text);
}

/** Return what POST `path` answers. Done once, however often it is sent. Throws a Problem, as `get`. */
export const post = (path, body) => call("POST", path, body, { "Idempotency-Key": newKey() });

/** Return what GET `path` answers, and the `tag` that a change of it has to name. */
export async function getTagged(path) {
  const answer = await send("GET", path);
  return { found: await answer.json(), tag: answer.headers.get("ETag") };
}

/** Return what PATCH `path` answers: a change of what has this `tag` still. Throws a Problem, 412 where it has another. */
export const patch = (path, body, tag) => call("PATCH", path, body, { "If-Match": tag });

/** Exchange the code of the link that this page was opened by, if any, for a session of this tab: a cookie, and a ticket in place of a token. */
export async function enter() {
  const code = new URLSearchParams(location.hash.slice(1)).get("code");
  if (code === null) return;
  history.replaceState(null, "", location.pathname);
  const answer = await fetch("session", { method: "POST", headers: { Authorization: `Bearer ${code}` } });
  if (answer.ok) keepToken((await answer.json()).ticket);
  else refused = (await problemOf(answer)).message;
}

/** Let the person keep what GET `path` answers as a file: a link to it could not send the token. */
export async function save(path) {
  const answer = await send("GET", path, undefined, { Accept: "*/*" }), link = document.createElement("a");
  [link.href, link.download] = [URL.createObjectURL(await answer.blob()), path];
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), AGAIN_MS);
}

async function call(method, path, body, more) {
  const answer = await send(method, path, body, more);
  return answer.json();
}

async function send(method, path, body, more = {}) {
  for (;;) {
    const sent = sessionStorage.getItem(KEPT_AS);
    const headers = { Accept: "application/json", ...more };
    if (sent !== null) headers.Authorization = `Bearer ${sent}`;
    if (body !== undefined) headers["Content-Type"] = "application/json";
    const stop = new AbortController(), late = setTimeout(() => stop.abort(new Error(`the coordinator has not answered for ${SILENT_MS / 1000} s: it is frozen, or short of processor time`)), SILENT_MS);
    const answer = await fetch(path, { method, headers, signal: stop.signal, body: body === undefined ? undefined : JSON.stringify(body) }).finally(() => clearTimeout(late));
    if (answer.ok || answer.status === 304) return answer;
    const problem = await problemOf(answer);
    if (answer.status !== 401 && !(answer.status === 403 && method !== "GET")) throw problem;
    if (sessionStorage.getItem(KEPT_AS) !== sent) continue; // another request has asked in the meantime
    if (sent !== null && answer.status === 401) refused = "the coordinator does not accept this token, or the session has ended";
    asking ??= ask(answer.status, refused).finally(() => { asking = null; });
    refused = "";
    await asking;
  }
}

async function problemOf(answer) {
  try {
    const { detail, errors } = await answer.json();
    return new Problem(answer.status, detail, errors);
  } catch {
    return new Problem(answer.status, `the coordinator answered ${answer.status}`);
  }
}

// crypto.randomUUID is there on https and localhost only
const newKey = () => [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

/**
 * Tell each event as it happens, until `isOver()`, from behind the entry `after`. An EventSource cannot send a token, so this reads
 * the stream itself; like one, it comes again after a cut with the last id that it saw.
 */
export async function follow(after, told, isOver) {
  let last = after;
  while (!isOver()) {
    try {
      const from = last === null ? {} : { "Last-Event-ID": last };
      const answer = await send("GET", "v1/events/stream", undefined, { Accept: "text/event-stream", ...from });
      for await (const event of events(answer.body)) {
        last = event.id;
        told(event);
      }
    } catch {
      // cut off, or refused: the poll of the run says so
    }
    await new Promise((resolve) => { setTimeout(resolve, AGAIN_MS); });
  }
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const blocks = text.split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").find((line) => line.startsWith("data: "));
      if (data !== undefined) yield JSON.parse(data.slice(6));
    }
  }
}

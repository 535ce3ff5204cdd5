// One dead letter: why it could not be handled, what is in it, and what becomes of it.

import { get } from "./api.js";
import { confirm } from "./commands.js";
import { facts, show } from "./dialog.js";
import { clock, el } from "./dom.js";

/** Show dead letter `one` (of GET /v1/dead-letters), decoded. */
export async function showLetter(one, done) {
  const path = `v1/dead-letters/${one.stream}/${one.entry}`;
  const found = await get(path);
  const again = { title: "Put it back?", sentence: `Group ${one.group} goes back onto ${one.stream}, and is tried again.`, yes: "Put back", path: `${path}/requeue`, done };
  const away = { title: "Discard it?", sentence: `Group ${one.group} is removed from the run and counted as discarded.`, yes: "Discard", path: `${path}/discard`, done, danger: true, why: true };
  return show({
    title: `A dead letter of ${one.stream}`,
    body: [
      facts([["group", one.group], ["why", one.reason], ["times tried", String(one.attempts)], ["buried at", clock(one.buried_at_s)], ["unreadable", found.unreadable]]),
      found.message === null ? "" : el("pre", { tabindex: 0, "aria-label": "Contents" }, JSON.stringify(found.message, null, 1)),
    ],
    commands: [["Put back…", () => confirm(again)], ["Discard…", () => confirm(away)]],
  });
}

// Pieces of the document. Whatever comes from a run goes in as text: nothing here, or anywhere in the page, parses HTML.

const HOURS = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" }), DAYS = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });
const SVG = "http://www.w3.org/2000/svg";

/** Return a new element. Attributes that are null or false are left out; those that begin with "on" are listeners. */
export const el = (name, attributes, ...children) => made(document.createElement(name), attributes, children);

/** Return a new SVG element. */
export const svg = (name, attributes, ...children) => made(document.createElementNS(SVG, name), attributes, children);

/** Return the element of this id. */
export const byId = (id) => document.getElementById(id);

function made(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}

/** Set a node's text, where it is another. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/**
 * Put new children into a node when `data` is not what they were made of last time. What has the focus keeps it, by its `data-key`.
 */
export function redraw(node, data, make) {
  const mark = JSON.stringify(data);
  if (node.drawnFrom === mark) return;
  node.drawnFrom = mark;
  const focused = node.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  node.replaceChildren(...[make()].flat());
  if (focused !== undefined) node.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
}

/** Return a number for people: thousands' commas, three significant digits below. */
export function figure(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(3)));
}

/** Return seconds for people. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const whole = Math.round(seconds), minutes = Math.floor(whole / 60), hours = Math.floor(minutes / 60);
  if (whole < 60) return `${whole} s`;
  if (hours < 1) return `${minutes} min ${whole % 60} s`;
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** Return a Unix time as a clock shows it here, with the date where it is another day. */
export function clock(atS) {
  const at = new Date(atS * 1000), time = HOURS.format(at);
  return at.toDateString() === new Date().toDateString() ? time : `${DAYS.format(at)} ${time}`;
}

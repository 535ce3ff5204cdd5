// What the page remembers of a run: the reports of its steps and its versions, read whole once and then only what is new.

import { get } from "./api.js";

const PAGE = 500;
/** The page shows at most so many of the newest steps. */
const MOST_STEPS = 2000;
/** Versions so near to the newest are read each time; older ones, whose checkpoints may have been cleaned up, each so many times. */
const CHANGING = 60, WHOLE_EVERY = 20;

export class History {
  /** Newest report of each step, in order of the steps. */
  steps = [];
  /** Versions, oldest first. */
  policies = [];
  #newestReport = null;
  #whole = false;
  #reads = 0;

  /** Read the reports that are new. A step that was trained again, after a rollback, replaces those from it on. */
  async readSteps() {
    const found = [];
    let cursor = null;
    do {
      const limit = this.#newestReport === null ? PAGE : 50;
      const page = await get(`v1/run/steps?limit=${limit}${cursor === null ? "" : `&cursor=${cursor}`}`);
      const known = page.items.findIndex((one) => one.id === this.#newestReport);
      found.push(...(known < 0 ? page.items : page.items.slice(0, known)));
      cursor = known < 0 ? page.next : null;
    } while (cursor !== null && found.length < MOST_STEPS);
    if (found.length === 0) return;
    this.#newestReport = found[0].id;
    for (const report of found.toReversed()) {
      while (this.steps.length > 0 && this.steps.at(-1).step >= report.step) this.steps.pop();
      this.steps.push(report);
    }
    this.steps.splice(0, this.steps.length - MOST_STEPS);
  }

  /** Read the versions: all of them the first time, after `forget` and now and then, else the newest. */
  async readPolicies(run) {
    this.#reads += 1;
    const from = this.#whole && this.#reads % WHOLE_EVERY !== 0 && run.newest_version !== null ? run.newest_version - CHANGING : -1;
    this.#whole = true; // before reading: what is changed meanwhile may ask for more
    try {
      this.policies = await this.#policiesFrom(from);
    } catch (problem) {
      this.#whole = false;
      throw problem;
    }
  }

  async #policiesFrom(from) {
    const found = this.policies.filter((one) => one.version <= from);
    let cursor = from < 0 ? null : String(from);
    do {
      const page = await get(`v1/policies?limit=${PAGE}${cursor === null ? "" : `&cursor=${cursor}`}`);
      found.push(...page.items);
      cursor = page.next;
    } while (cursor !== null);
    return found;
  }

  /** Read all versions again: some that are old were changed. */
  forget() {
    this.#whole = false;
  }
}

// The versions that the page remembers: read whole once and then only what is new.

import { get } from "./api.js";

const PAGE = 500;
/** Versions so near to the newest are read each time; older ones, whose checkpoints may have been cleaned up, each so many times. */
const CHANGING = 60, WHOLE_EVERY = 20;

export class History {
  /** Versions, oldest first. */
  policies = [];
  #whole = false;
  #reads = 0;

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

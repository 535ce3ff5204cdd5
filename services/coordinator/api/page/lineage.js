// Where versions come from, drawn as a graph: newest at the top, the live branch at the left. What happened to nobody's notice is folded.

import { clock, el, figure, redraw, svg } from "./dom.js";
import { canGoBack } from "./version.js";

const LANE = 18;

/** Show `policies` (GET /v1/policies, oldest first); `rollBack(version)` and `look(version)` are called by a version's buttons. */
export function drawLineage(node, policies, head, runState, rollBack, look) {
  redraw(node, [policies, head, runState], () => {
    if (policies.length === 0) return el("li", { class: "soft" }, "no version yet");
    const graph = graphOf(policies, head);
    node.style.setProperty("--lanes", `${graph.width}px`);
    return rowsOf(policies, graph, head).map((row) =>
      (row.length > 1 || !graph.told.has(row[0].version)
        ? foldOf(row, graph)
        : rowOf(row[0], graph, head, canGoBack(row[0], runState) ? rollBack : null, look)));
  });
}

/** Part versions into branches: [{parent, first, last, versions, lane, revoked}]; the head's own has lane 0. */
function graphOf(policies, head) {
  const known = new Map(policies.map((one) => [one.version, one]));
  const ofHead = new Set();
  for (let at = known.get(head ?? policies.at(-1).version); at !== undefined; at = known.get(at.parent)) ofHead.add(at.version);
  const branchOf = new Map();
  const branches = [{ parent: null, versions: [], lane: 0 }];
  for (const one of policies) {
    const above = branchOf.get(one.parent);
    let branch = ofHead.has(one.version) ? branches[0] : above;
    if (branch === undefined || (branch === branches[0] && !ofHead.has(one.version)) || (branch === above && branch !== branches[0] && branch.versions.at(-1) !== one.parent)) {
      branch = { parent: one.parent, versions: [] };
      branches.push(branch);
    }
    branch.versions.push(one.version);
    branchOf.set(one.version, branch);
  }
  for (const branch of branches) {
    branch.first = branch.parent ?? branch.versions[0];
    branch.last = branch.versions.at(-1);
    branch.revoked = branch.versions.every((version) => known.get(version).state === "revoked");
    branch.lane ??= freeLane(branches, branch);
  }
  const parents = branches.flatMap((branch) => (branch.parent === null ? [] : [branch.parent]));
  const told = new Set([...parents, ...branches.flatMap((branch) => [branch.versions[0], branch.last])]);
  for (const one of policies) if (one.checkpoint || one.released || one.pinned || one.evaluations.length > 0 || one.version === head) told.add(one.version);
  const lanes = Math.max(...branches.map((branch) => branch.lane)) + 1;
  return { branches, branchOf, told, width: lanes * LANE + 4 };
}

/** The first lane that no earlier branch holds at the same time. */
function freeLane(branches, branch) {
  const taken = branches.filter((one) => one.lane !== undefined && one.first < branch.last && branch.first < one.last).map((one) => one.lane);
  let lane = 1;
  while (taken.includes(lane)) lane += 1;
  return lane;
}

/** Newest first; versions in a row that nothing is to be told of share one. */
function rowsOf(policies, graph) {
  const rows = [];
  for (const one of policies.toReversed()) {
    const before = rows.at(-1);
    const joins = before !== undefined && !graph.told.has(one.version) && !graph.told.has(before[0].version)
      && graph.branchOf.get(one.version) === graph.branchOf.get(before[0].version);
    if (joins) before.push(one);
    else rows.push([one]);
  }
  return rows;
}

function rowOf(one, graph, head, rollBack, look) {
  const button = (name, said, text, act) => el("button", { type: "button", class: "quiet", "data-key": `${name}-${one.version}`, "aria-label": said, onclick: () => act(one) }, text);
  return el("li", { class: "version", "data-version": one.version },
    lanesOf(one.version, graph, one.version === head),
    el("div", { class: "named" }, el("b", { title: `made at ${clock(one.created_at_s)}` }, `v${one.version}`), badges(one)),
    el("div", { class: "measured" }, el("span", {}, `step ${figure(one.step)}`), el("span", {}, `reward ${figure(one.metrics.reward_mean)}`)),
    el("div", { class: "acts" },
      rollBack === null ? "" : button("back", `Roll back to version ${one.version}…`, "Roll back…", rollBack),
      button("more", `More of version ${one.version}…`, "More…", look)));
}

function badges(one) {
  const found = [[one.state ?? "", one.state ?? ""]];
  if (one.checkpoint !== null) found.push(["checkpoint", "checkpoint"]);
  for (const made of one.evaluations) found.push(["evaluated", `${made.set} ${figure(made.accuracy)}`]);
  if (one.released) found.push(["released", "released"]);
  if (one.pinned) found.push(["pinned", "pinned"]);
  return found.filter(([kind]) => kind !== "" && kind !== "retired").map(([kind, text]) => el("span", { class: `badge ${kind}` }, text));
}

function foldOf(row, graph) {
  const [newest, oldest] = [row[0].version, row.at(-1).version];
  const named = newest === oldest ? `v${newest}` : `v${oldest} to v${newest}`;
  const revoked = row.every((one) => one.state === "revoked") ? ", revoked" : "";
  return el("li", { class: "version fold" }, lanesOf(newest, graph, false, true), el("span", {}, `${named}${revoked}`), el("span"), el("span"));
}

function lanesOf(version, graph, isHead, folded = false) {
  const own = graph.branchOf.get(version);
  const at = (branch) => branch.lane * LANE + LANE / 2 + 2;
  const marks = [];
  for (const branch of graph.branches) {
    const kind = branch.revoked ? "gone" : "";
    const draw = (y1, y2, x2 = at(branch), more = "") => marks.push(svg("line", { x1: at(branch), x2, y1, y2, class: `${kind} ${more}` }));
    if (branch === own && folded) draw("0", "100%", at(branch), "passed");
    else if (branch === own) {
      if (version < branch.last) draw("0", "50%");
      if (version > branch.first) draw("50%", "100%");
    } else if (version === branch.parent) draw("0", "50%", at(own));
    else if (branch.first < version && version < branch.last) draw("0", "100%");
  }
  const dot = svg("circle", { cx: at(own), cy: "50%", r: 5, class: `${isHead ? "head" : ""} ${own.revoked ? "gone" : ""}` });
  return svg("svg", { width: graph.width, "aria-hidden": "true" }, marks, folded ? "" : dot);
}

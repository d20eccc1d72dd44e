"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const { analysis, patterns, index } = DATA;
const SVG = "http://www.w3.org/2000/svg";
const PAGE = 100;
const LOW_LOGPROB = -3;
const SMOOTH_FROM = 20; // points

// -- small helpers; text only ever reaches the page as text

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const percent = (share) => `${(100 * share).toFixed(1)} %`;
const titled = (node, text) => { node.append(svg("title", {}, text)); return node; };

// -- chunks: gzip in base64, unpacked when they are needed

const parsed = new Promise((done) => {
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", done);
  else done();
});
const unpacked = new Map();

async function unpack(id) {
  await parsed;
  const text = atob(document.getElementById(id).textContent);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

async function chunk(id) {
  if (!unpacked.has(id)) {
    unpacked.set(id, unpack(id).then(JSON.parse));
    if (unpacked.size > 12) unpacked.delete(unpacked.keys().next().value);
  }
  return unpacked.get(id);
}

async function episode(row) {
  const { prompts, episodes } = await chunk(`chunk-${index.chunk[row]}`);
  const found = episodes[index.place[row]];
  return { ...found, prompt: prompts[found.p] };
}

// -- charts

function ticks(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  const scale = 10 ** Math.floor(Math.log10(raw || 1));
  const step = Math.max(1, [1, 2, 5, 10].map((m) => m * scale).find((s) => s >= raw) || 1);
  const values = [];
  for (let v = Math.ceil(low / step) * step; v <= high; v += step) values.push(v);
  return values;
}

function movingMean(points, width) {
  return points.map(([x], i) => {
    const window = points.slice(Math.max(0, i - width + 1), i + 1);
    return [x, window.reduce((sum, p) => sum + p[1], 0) / window.length];
  });
}

function chart(title, series, [from, to], label) {
  const W = 460, H = 210, L = 44, R = 12, T = 10, B = 34;
  const x = (v) => L + (to === from ? 0.5 : (v - from) / (to - from)) * (W - L - R);
  const y = (v) => T + (1 - Math.min(1, Math.max(0, v))) * (H - T - B);
  const root = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${title}: ${label} by step` });
  for (const v of [0, 0.25, 0.5, 0.75, 1]) {
    root.append(svg("line", { class: "grid", x1: L, x2: W - R, y1: y(v), y2: y(v) }));
    root.append(svg("text", { x: L - 6, y: y(v) + 4, "text-anchor": "end" }, `${100 * v}`));
  }
  const marks = from === to ? [from] : ticks(from, to, 6);
  for (const v of marks) {
    root.append(svg("line", { class: "axis", x1: x(v), x2: x(v), y1: H - B, y2: H - B + 4 }));
    root.append(svg("text", { x: x(v), y: H - B + 16, "text-anchor": "middle" }, `${v}`));
  }
  root.append(svg("line", { class: "axis", x1: L, x2: W - R, y1: H - B, y2: H - B }));
  root.append(svg("text", { x: (L + W - R) / 2, y: H - 4, "text-anchor": "middle" }, "optimiser step"));
  root.append(svg("text", { x: 11, y: (T + H - B) / 2, "text-anchor": "middle", transform: `rotate(-90 11 ${(T + H - B) / 2})` }, label));
  for (const s of series) {
    if (s.points.length === 0) continue;
    if (s.shape === "line") drawLine(root, s, x, y);
    else for (const point of s.points) drawPoint(root, s, point, x, y);
  }
  return root;
}

function drawLine(root, s, x, y) {
  const path = (points) => points.map(([a, b], i) => `${i ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");
  const smooth = s.points.length > SMOOTH_FROM;
  const style = { fill: "none", stroke: `var(${s.colour})`, "stroke-dasharray": s.dash || "none" };
  root.append(svg("path", { ...style, d: path(s.points), "stroke-width": smooth ? 1 : 2, opacity: smooth ? 0.35 : 1 }));
  if (smooth) root.append(svg("path", { ...style, d: path(movingMean(s.points, 5)), "stroke-width": 2 }));
  for (const [a, b] of s.points) {
    root.append(titled(svg("circle", { cx: x(a), cy: y(b), r: 5, fill: "transparent" }), `${s.name}, step ${a}: ${s.show(b)}`));
  }
}

function drawPoint(root, s, [step, rate, low, high], x, y) {
  const colour = `var(${s.colour})`, cx = x(step) + (s.shift || 0), cy = y(rate);
  root.append(svg("line", { x1: cx, x2: cx, y1: y(low), y2: y(high), stroke: colour, "stroke-width": 1.5 }));
  for (const end of [low, high]) root.append(svg("line", { x1: cx - 3, x2: cx + 3, y1: y(end), y2: y(end), stroke: colour }));
  const mark = s.shape === "square" ? svg("rect", { x: cx - 4, y: cy - 4, width: 8, height: 8, fill: "var(--panel)", stroke: colour, "stroke-width": 2 })
    : svg("circle", { cx, cy, r: 4.5, fill: colour });
  root.append(titled(mark, `${s.name}, step ${step}: ${percent(rate)} [${percent(low)}, ${percent(high)}]`));
}

function legend(series) {
  const box = el("div", { class: "legend" });
  for (const s of series.filter((one) => one.points.length)) {
    const key = svg("svg", { viewBox: "0 0 22 10", "aria-hidden": "true" });
    const colour = `var(${s.colour})`;
    if (s.shape === "line") key.append(svg("line", { x1: 0, x2: 22, y1: 5, y2: 5, stroke: colour, "stroke-width": 2, "stroke-dasharray": s.dash || "none" }));
    else if (s.shape === "square") key.append(svg("rect", { x: 7, y: 1, width: 8, height: 8, fill: "none", stroke: colour, "stroke-width": 2 }));
    else key.append(svg("circle", { cx: 11, cy: 5, r: 4.5, fill: colour }));
    box.append(el("span", {}, key, s.name));
  }
  return box;
}

function drawCurves() {
  const charts = document.getElementById("charts");
  const entries = Object.entries(analysis.curves);
  if (entries.length === 0) charts.append(el("p", { class: "meta" }, "No metrics and no evaluations were found."));
  for (const [env, curves] of entries) {
    const of = (name) => curves[name] || [];
    const reward = [
      { name: `training pass@1${of("reward").length > SMOOTH_FROM ? ", thick: mean of 5 steps" : ""}`, colour: "--c1", shape: "line", points: of("reward"), show: percent },
      { name: "held-out pass@1, sampled", colour: "--c2", shape: "dot", points: of("sampled") },
      { name: "held-out pass@1, greedy", colour: "--c3", shape: "square", points: of("greedy"), shift: 8 },
    ];
    const signal = [
      { name: "tasks with signal", colour: "--c4", shape: "line", points: of("signal"), show: percent },
      { name: "variance, of its maximum 0.25", colour: "--c3", shape: "line", dash: "5 3",
        points: of("variance").map(([step, v]) => [step, v / 0.25]), show: (v) => (v * 0.25).toFixed(3) },
    ];
    const steps = [...reward, ...signal].flatMap((s) => s.points.map((point) => point[0]));
    const range = [Math.min(...steps), Math.max(...steps)]; // a few hundred points a curve at most
    const card = el("div", { class: "card" }, el("h3", {}, env), legend(reward), chart(env, reward, range, "success, %"));
    if (signal.some((s) => s.points.length)) card.append(legend(signal), chart(env, signal, range, "signal, %"));
    charts.append(card);
  }
}

function drawForest() {
  const rows = [...analysis.environments, analysis.overall];
  for (const cell of document.querySelectorAll(".forest")) {
    const row = rows[Number(cell.dataset.row)];
    const x = (v) => 6 + 138 * v;
    const root = svg("svg", { viewBox: "0 0 150 22", role: "img", "aria-label": "success before and after" });
    for (const v of [0, 0.5, 1]) root.append(svg("line", { class: "grid", x1: x(v), x2: x(v), y1: 0, y2: 22 }));
    for (const [step, cy, fill] of [[row.before, 7, "var(--bg)"], [row.after, 15, "var(--c2)"]]) {
      if (!step || !step.success || (cy === 15 && row.before?.step === row.after.step)) continue;
      const { rate, interval } = step.success;
      root.append(svg("line", { x1: x(interval.low), x2: x(interval.high), y1: cy, y2: cy, stroke: "var(--c2)", "stroke-width": 1.5 }));
      root.append(titled(svg("circle", { cx: x(rate), cy, r: 4, fill, stroke: "var(--c2)", "stroke-width": 1.5 }),
        `step ${step.step}: ${percent(rate)} [${percent(interval.low)}, ${percent(interval.high)}]`));
    }
    cell.append(root);
  }
}

// -- one episode

const CALL = /(<(tool_call|function_call)>[\s\S]*?(?:<\/\2>|$))|(<done>|\[done\])/gi;

function written(text, needle) {
  const pre = el("pre");
  let at = 0;
  for (const match of text.matchAll(CALL)) {
    pre.append(...marked(text.slice(at, match.index), needle));
    pre.append(match[1] ? call(match[1], needle) : el("span", { class: "done" }, match[0]));
    at = match.index + match[0].length;
  }
  pre.append(...marked(text.slice(at), needle));
  return pre;
}

function call(text, needle) {
  const body = text.replace(/^<\w+>|<\/\w+>$/g, "");
  try {
    const { name, tool, arguments: args, params } = JSON.parse(body);
    return el("span", { class: "call" }, el("b", {}, String(name ?? tool)), " ", ...marked(JSON.stringify(args ?? params ?? {}), needle));
  } catch {
    return el("span", { class: "call" }, ...marked(body, needle));
  }
}

function marked(text, needle) {
  if (!needle) return [text];
  const parts = [], low = text.toLowerCase();
  let at = 0;
  for (let hit = low.indexOf(needle); hit >= 0; hit = low.indexOf(needle, at)) {
    parts.push(text.slice(at, hit), el("mark", {}, text.slice(hit, hit + needle.length)));
    at = hit + needle.length;
  }
  parts.push(text.slice(at));
  return parts;
}

function renderEpisode(row, found, needle = "") {
  const box = el("div", {});
  box.append(el("h3", {}, `${index.envs[index.env[row]]} / ${index.tasks[index.task[row]]}`));
  box.append(el("p", { class: "meta" }, `step ${index.step[row]}, ${index.labels[index.label[row]]}, ${outcome(row)}, stop reason ${index.stops[index.stop[row]]}, `
    + `${index.turns[row]} turns, ${index.calls[row]} calls, ${index.failed[row]} failed — ${found.w}`));
  for (const [role, text] of found.prompt) {
    const long = text.length > 600;
    const body = el("pre", {}, ...marked(text, needle));
    const title = `${role}${long ? ` (${text.length.toLocaleString("en")} characters)` : ""}`;
    box.append(el("div", { class: "turn told" }, long ? el("details", { open: hasHit(text, needle) }, el("summary", {}, title), body) : el("div", {}, el("div", { class: "who" }, title), body)));
  }
  found.t.forEach(([thinking, text, observation, error], i) => {
    const flags = found.f.filter(([, turn]) => turn === i);
    const who = el("div", { class: "who" }, `turn ${i + 1}, policy`, ...flags.map(([p, , quote]) => el("span", { class: "flag", title: quote }, `⚑ ${patterns[p].title}`)));
    const turn = el("div", { class: `turn${flags.length ? " found" : ""}` }, who);
    if (thinking) {
      turn.append(el("details", { open: hasHit(thinking, needle) }, el("summary", {}, `thinking (${thinking.length.toLocaleString("en")} characters)`), el("pre", {}, ...marked(thinking, needle))));
    }
    turn.append(written(text, needle));
    box.append(turn);
    if (observation !== null) {
      box.append(el("div", { class: `turn result${error ? " error" : ""}` }, el("div", { class: "who" }, error ? "result: an error" : "result"), el("pre", {}, ...marked(observation, needle))));
    }
  });
  if (found.k !== undefined) box.append(tokenView(found.k));
  return box;
}

const hasHit = (text, needle) => Boolean(needle) && text.toLowerCase().includes(needle);

function tokenView(place) {
  const details = el("details", {}, el("summary", {}, "tokens: mask, policy version, logprob"));
  details.addEventListener("toggle", async () => {
    if (!details.open || details.children.length > 1) return;
    const [all, vocabulary] = await Promise.all([chunk(`tokens-${place[0]}`), DATA.vocabulary ? chunk("vocabulary") : {}]);
    details.append(...renderTokens(all[place[1]], vocabulary));
  });
  return details;
}

function renderTokens({ ids, mask, logprobs, spans, starts }, vocabulary) {
  const bits = mask.flatMap((length, i) => Array(length).fill(i % 2));
  const versions = spans.flatMap(([version, from, to]) => Array(to - from).fill(version));
  const kinds = [...new Set(versions)].sort((a, b) => a - b);
  const box = el("div", { class: "tokens" }), prompt = el("div", { class: "tokens" });
  const first = bits.includes(1) ? bits.indexOf(1) : bits.length;
  let sampled = 0;
  ids.forEach((id, i) => {
    if (i && starts.includes(i)) box.append(el("hr")); // the policy rewrote its history here
    const piece = vocabulary[id] ?? `⟨${id}⟩`;
    if (!bits[i]) {
      (i < first ? prompt : box).append(el("span", { title: `token ${i}, id ${id}: context` }, piece));
      return;
    }
    const version = versions[sampled++], logprob = logprobs[i];
    const title = `token ${i}, id ${id}, version ${version}, logprob ${logprob}, probability ${logprob === null ? "?" : Math.exp(logprob).toFixed(4)}`;
    box.append(el("span", { class: `m v${(kinds.indexOf(version) + 1) % 4}${logprob !== null && logprob < LOW_LOGPROB ? " low" : ""}`, title }, piece));
  });
  const sum = `${ids.length.toLocaleString("en")} tokens, ${sampled.toLocaleString("en")} sampled (shaded), under version${kinds.length === 1 ? "" : "s"} ${kinds.join(", ")} (underlined in turn); `
    + `red: logprob below ${LOW_LOGPROB}. Point at a token for its figures.`;
  return [el("p", { class: "meta" }, sum), el("details", {}, el("summary", {}, `${first.toLocaleString("en")} tokens of the prompt`), prompt), box];
}

function outcome(row) {
  const reward = index.reward[row];
  return reward === null ? "not graded" : `reward ${Number(reward.toFixed(4))}`;
}

const mark = (row) => {
  const reward = index.reward[row];
  return reward === null ? el("span", {}, "?") : el("span", { class: reward > 0 ? "good" : "bad" }, reward > 0 ? `✓ ${Number(reward.toFixed(2))}` : "✗ 0");
};

// -- before and after

const rowsOfTask = new Map();
index.task.forEach((task, row) => {
  const key = `${index.env[row]} ${task}`;
  if (!rowsOfTask.has(key)) rowsOfTask.set(key, []);
  rowsOfTask.get(key).push(row);
});

function drawPairs() {
  const box = document.getElementById("pairs");
  const numbers = (names) => new Map(names.map((name, i) => [name, i]));
  const envs = numbers(index.envs), tasks = numbers(index.tasks);
  const pairs = analysis.tasks.map((change) => {
    const rows = rowsOfTask.get(`${envs.get(change.env)} ${tasks.get(change.task)}`) || [];
    const at = (step) => rows.filter((row) => index.step[row] === step && index.labels[index.label[row]] === analysis.label);
    return { change, before: at(analysis.baseline), after: at(analysis.last) };
  }).filter((pair) => pair.before.length && pair.after.length);
  if (analysis.baseline === analysis.last || pairs.length === 0) {
    box.append(el("p", { class: "meta" }, "There is no task with episodes at two steps on this page."));
    return;
  }
  const rate = (v) => v === null ? "–" : `${Math.round(100 * v)} %`;
  const select = el("select", { "aria-label": "task" }, ...pairs.map(({ change }, i) =>
    el("option", { value: i }, `${change.env} / ${change.task}: ${rate(change.before)} → ${rate(change.after)}`)));
  const view = el("div", { class: "two" }, el("div"), el("div"));
  const move = (by) => { select.value = (Number(select.value) + by + pairs.length) % pairs.length; show(); };
  const show = () => {
    const { before, after } = pairs[Number(select.value)];
    attempts(view.children[0], `before: step ${analysis.baseline}`, before);
    attempts(view.children[1], `after: step ${analysis.last}`, after);
  };
  select.addEventListener("change", show);
  box.append(el("p", {}, el("button", { type: "button", onclick: () => move(-1), "aria-label": "previous task" }, "‹"), " ", select, " ",
    el("button", { type: "button", onclick: () => move(1), "aria-label": "next task" }, "›"), el("span", { class: "meta" }, `  ${pairs.length} tasks, the largest changes first`)), view);
  show();
}

function attempts(pane, title, rows) {
  const tabs = el("div", { class: "tabs" }), body = el("div");
  const show = async (row) => {
    [...tabs.children].forEach((tab, i) => tab.setAttribute("aria-pressed", rows[i] === row));
    body.replaceChildren(renderEpisode(row, await episode(row)));
  };
  rows.forEach((row, i) => tabs.append(el("button", { type: "button", onclick: () => show(row) }, `attempt ${i + 1} `, mark(row))));
  pane.replaceChildren(el("h3", {}, title), tabs, body);
  show(rows[0]);
}

// -- list, filters, search

const filters = {};
let matches = [], shownRows = 0, chosen = null, searched = null, needle = "", search = 0;

function select(name, label, options) {
  const box = el("select", { onchange: refresh }, el("option", { value: "" }, "any"), ...options.map(([value, text]) => el("option", { value }, text)));
  filters[name] = box;
  return el("label", {}, label, box);
}

function drawFilters() {
  const named = (names) => names.map((name, i) => [i, name]);
  const text = el("input", { type: "search", placeholder: "in prompts, turns and results", oninput: delayed(startSearch, 300) });
  filters.text = text;
  document.getElementById("filters").append(
    select("env", "environment", named(index.envs)),
    select("step", "step", [...new Set(index.step)].sort((a, b) => a - b).map((s) => [s, s])),
    select("label", "kind", named(index.labels)),
    select("outcome", "outcome", [["solved", "solved"], ["zero", "reward 0"], ["ungraded", "not graded"]]),
    select("stop", "stop reason", named(index.stops)),
    select("pattern", "error pattern", named(patterns.map((p) => p.title))),
    el("label", {}, "search", text),
    el("button", { type: "button", onclick: () => setFilters({}) }, "Clear"),
  );
  document.getElementById("filters").addEventListener("submit", (event) => event.preventDefault());
}

function setFilters(values) {
  for (const [name, box] of Object.entries(filters)) box.value = values[name] ?? "";
  startSearch();
}

function delayed(action, ms) {
  let timer;
  return () => { clearTimeout(timer); timer = setTimeout(action, ms); };
}

function passes(row) {
  const value = (name) => filters[name].value, reward = index.reward[row];
  return (!value("env") || index.env[row] === Number(value("env")))
    && (!value("step") || index.step[row] === Number(value("step")))
    && (!value("label") || index.label[row] === Number(value("label")))
    && (!value("stop") || index.stop[row] === Number(value("stop")))
    && (!value("pattern") || index.flags[row] & (1 << Number(value("pattern"))))
    && (!value("outcome") || { solved: reward > 0, zero: reward !== null && reward <= 0, ungraded: reward === null }[value("outcome")])
    && (searched === null || searched.has(row));
}

function refresh() {
  matches = index.task.map((_, row) => row).filter(passes);
  shownRows = 0;
  document.getElementById("list").replaceChildren(el("table", {}, el("thead", {}, el("tr", {},
    ...["environment", "task", "step", "reward", "stop", "turns", "calls", "⚑"].map((name) => el("th", {}, name)))), el("tbody")));
  more();
  say("");
}

function say(progress) {
  document.getElementById("count").textContent = `${matches.length.toLocaleString("en")} of ${index.task.length.toLocaleString("en")} episodes ${progress}`;
}

function more() {
  const list = document.getElementById("list"), body = list.querySelector("tbody");
  list.querySelector(".more")?.remove();
  for (const row of matches.slice(shownRows, shownRows + PAGE)) {
    const flags = patterns.filter((_, i) => index.flags[row] & (1 << i));
    body.append(el("tr", { tabindex: 0, "data-row": row, "aria-selected": row === chosen, onclick: () => choose(row), onkeydown: keys },
      el("td", {}, index.envs[index.env[row]]), el("td", {}, index.tasks[index.task[row]]), el("td", { class: "n" }, `${index.step[row]} ${index.labels[index.label[row]]}`),
      el("td", {}, mark(row)), el("td", { class: "s" }, index.stops[index.stop[row]]), el("td", { class: "n" }, `${index.turns[row]}`), el("td", { class: "n" }, `${index.calls[row]}`),
      el("td", { class: "n", title: flags.map((p) => p.title).join(", ") }, flags.length ? `${flags.length}` : "")));
  }
  shownRows += PAGE;
  if (shownRows < matches.length) list.append(el("p", { class: "more" }, el("button", { type: "button", onclick: more }, `Show more (${(matches.length - shownRows).toLocaleString("en")} left)`)));
}

function keys(event) {
  const row = event.currentTarget;
  const next = { ArrowDown: row.nextElementSibling, ArrowUp: row.previousElementSibling }[event.key];
  if (event.key === "Enter") choose(Number(row.dataset.row));
  if (!next) return;
  event.preventDefault();
  next.focus();
  choose(Number(next.dataset.row));
}

async function choose(row) {
  chosen = row;
  for (const line of document.querySelectorAll("#list tbody tr")) line.setAttribute("aria-selected", Number(line.dataset.row) === row);
  const found = await episode(row);
  if (chosen !== row) return;
  const detail = document.getElementById("detail");
  detail.replaceChildren(renderEpisode(row, found, needle));
  detail.scrollTop = 0;
  detail.querySelector("mark")?.scrollIntoView({ block: "center" });
}

async function startSearch() {
  const mine = ++search;
  needle = filters.text.value.trim().toLowerCase();
  searched = needle ? new Set() : null;
  refresh();
  if (!needle) return;
  // In the JSON of a chunk the text stands escaped; a chunk without it need not be parsed.
  const escaped = JSON.stringify(needle).slice(1, -1);
  const rowsOfChunk = new Map();
  index.chunk.forEach((c, row) => { if (!rowsOfChunk.has(c)) rowsOfChunk.set(c, []); rowsOfChunk.get(c).push(row); });
  let done = 0;
  for (const [c, rows] of rowsOfChunk) {
    const text = await unpack(`chunk-${c}`);
    if (mine !== search) return;
    if (text.toLowerCase().includes(escaped)) {
      const { prompts, episodes } = JSON.parse(text);
      for (const row of rows) {
        const { p, t } = episodes[index.place[row]];
        if (t.flat().some((s) => typeof s === "string" && s.toLowerCase().includes(needle)) || prompts[p].some(([, s]) => s.toLowerCase().includes(needle))) searched.add(row);
      }
    }
    if (++done % 20 === 0) { say(`(searched ${Math.round(100 * done / rowsOfChunk.size)} %)`); await new Promise((go) => setTimeout(go)); }
  }
  refresh();
}

function connect() {
  for (const button of document.querySelectorAll("[data-pattern]")) {
    button.addEventListener("click", () => {
      setFilters({ pattern: button.dataset.pattern, env: index.envs.indexOf(button.dataset.env) });
      document.getElementById("reader").scrollIntoView();
    });
  }
  const rowOf = new Map(index.file.map((file, row) => [`${file} ${index.position[row]}`, row]));
  for (const button of document.querySelectorAll("[data-position]")) {
    const row = rowOf.get(`${button.dataset.file} ${button.dataset.position}`);
    if (row === undefined) button.disabled = true;
    else button.addEventListener("click", () => { choose(row); document.getElementById("reader").scrollIntoView(); });
  }
  document.getElementById("theme").addEventListener("click", () => {
    const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    document.documentElement.dataset.theme = dark ? "light" : "dark";
  });
}

drawForest();
drawCurves();
drawFilters();
refresh();
connect();
drawPairs();

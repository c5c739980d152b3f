// Tiles, lanes, bars and the two charts over time, drawn anew with every event.

const TICKS = 240; // as many as the server keeps
const SMOOTH = 8; // ticks of a moving average: two seconds

function drawAll(live) {
  drawTiles(live);
  drawLanes(live);
  drawDepths(live);
  drawStrategies(live);
}

// --- tiles ---------------------------------------------------------------------------------------

/** A line over what is there of the last minute; null leaves a gap. */
function spark(svg, values, most) {
  const top = Math.max(most, 1e-9), y = (v) => (39 - 37 * Math.min(v / top, 1)).toFixed(1);
  let line = "", under = "";
  values.forEach((v, i) => {
    if (v === null) return;
    const begins = values[i - 1] == null, point = `${i} ${y(v)}`;
    line += `${begins ? "M" : "L"}${point}`;
    under += `${begins ? `M${i} 40` : ""}L${point}${values[i + 1] == null ? `L${i} 40` : ""}`;
  });
  svg.setAttribute("viewBox", `0 0 ${Math.max(values.length - 1, 1)} 40`);
  draw(svg, [["path", {d: under, class: "under"}], ["path", {d: line}]]);
}

function tile(id, value, text, values, most) {
  const node = $(id);
  say(node.querySelector(".value"), value);
  say(node.querySelector(".sub"), text);
  spark(node.querySelector(".spark"), values, most);
}

/** For each tick, what the last two seconds come to. */
function moving(ticks, of) {
  return ticks.map((_, i) => of(ticks.slice(Math.max(0, i - SMOOTH + 1), i + 1)));
}

function drawTiles(live) {
  const ticks = sinceFirst(live.ticks);
  const of = (some, name) => sum(some.map((tick) => tick[name]));
  const speeds = moving(ticks, (some) => of(some, "tokens") / of(some, "seconds"));
  tile("tile-speed", fixed(speeds.at(-1) ?? 0),
    `mean of 2 s; ${fixed(live.totals.tokens)} tokens since the start`,
    speeds, Math.max(0, ...speeds));

  const lengths = moving(ticks, (some) => {
    const rounds = of(some, "drafting");
    return rounds ? of(some, "drafting_tokens") / rounds : null;
  });
  const now = lengths.at(-1) ?? null;
  tile("tile-accept", now === null ? "–" : fixed(now, 2),
    "mean of 2 s, of rounds that draft, bonus included"
    + (now === null ? "; there are none now" : ""),
    lengths, 1 + Math.max(...Object.values(live.about.strategies).map((s) => s.steps)));

  const slots = sum(live.about.slots);
  tile("tile-queue", fixed(live.running),
    `in ${count(slots, "slot")}; ${live.waiting ? fixed(live.waiting) : "none"} `
    + `${live.waiting > 1 ? "wait" : "waits"} in the queue, which the curve leaves out`,
    ticks.map((t) => t.running), slots);
  tile("tile-pages", fixed(live.pages_used),
    `of ${fixed(live.pages)}; ${count(live.preemptions, "sample")} had to make room so far`,
    ticks.map((t) => t.pages), live.pages);
}

// --- lanes ---------------------------------------------------------------------------------------

const drawn = {lanes: [], about: null}; // per replica: {sizes, text, slots}

function buildLanes(about) {
  drawn.about = about;
  drawn.lanes = about.slots.map((slots, replica) => {
    const box = make("div", "replica"), sizes = make("div", "sizes"), grid = make("div", "lanes");
    if (about.slots.length > 1) box.append(make("h3", "note", `Replica ${replica}`));
    sizes.append(make("span", "note", "compiled size"));
    const chips = [...about.buckets].reverse().map((size) => {
      const chip = make("span", "size", String(size));
      sizes.append(chip);
      return [size, chip];
    });
    grid.classList.toggle("small", slots > 16);
    grid.classList.toggle("many", slots > 32);
    const text = make("p", "note");
    const lanes = Array.from({length: slots}, (_, slot) => {
      const lane = make("div", "lane idle"), track = make("div", "track");
      const parts = ["draft", "bonus", "plain"].map((name) => make("i", name));
      track.append(...parts);
      lane.append(make("span", "slot", String(slot)), track, make("span", "count"));
      return {lane, track, parts, number: lane.lastChild};
    });
    grid.append(...lanes.map(({lane}) => lane));
    grid.setAttribute("role", "img");
    box.append(sizes, grid, text);
    return {box, chips, grid, text, lanes};
  });
  $("lanes").replaceChildren(...drawn.lanes.map(({box}) => box));
}

/** One slot: a lane as long as its sample may become beside the others, or none. */
function fill(view, lane, longest) {
  view.lane.classList.toggle("idle", lane === undefined);
  if (lane === undefined) return;
  view.lane.classList.add("used");
  const came = lane.slice(2, 5), most = lane[5];
  view.track.style.width = `${100 * most / longest}%`;
  view.parts.forEach((part, i) => { part.style.width = `${100 * came[i] / most}%`; });
  say(view.number, `${sum(came)} / ${most}`);
}

function drawLanes(live) {
  if (drawn.about !== live.about) buildLanes(live.about);
  const running = live.replicas.flatMap(({lanes}) => lanes);
  const longest = Math.max(1, ...running.map((lane) => lane[5]));
  drawn.lanes.forEach((view, index) => {
    const {bucket, strategy, lanes} = live.replicas[index] ?? {bucket: 0, strategy: "", lanes: []};
    const now = lanes.length ? bucket : 0;
    for (const [size, chip] of view.chips) {
      chip.classList.toggle("now", size === now);
      chip.toggleAttribute("aria-current", size === now);
    }
    const by = new Map(lanes.map((lane) => [lane[0], lane]));
    view.lanes.forEach((lane, slot) => fill(lane, by.get(slot), longest));
    const slots = view.lanes.length;
    const how = live.about.strategies[strategy]?.drafted
      ? `drafting ${named(live.about, strategy)}` : "decoding plainly";
    const said = lanes.length
      ? `${lanes.length} of ${count(slots, "slot")} busy; the last chunk ran as a batch of `
        + `${bucket}, ${how}.`
      : `Nothing runs in ${count(slots, "slot")}.`;
    say(view.text, said);
    view.grid.setAttribute("aria-label", said);
  });
}

// --- acceptance per depth ------------------------------------------------------------------------

function drawDepths(live) {
  const now = live.depths.recent.some(([tries]) => tries > 0);
  const rows = (now ? live.depths.recent : live.depths.all).filter(([tries]) => tries > 0);
  const when = now ? "in the last minute" : "since the server started";
  const tried = rows.map(([tries]) => tries);
  const fewer = tried.some((tries) => tries < tried[0]);
  say($("depths-note"), rows.length
    ? "How often all drafts up to this depth were accepted, of the rounds that drafted so deep "
      + `${when}.${fewer ? " Some drafted less deep." : ""}`
    : "Nothing was drafted yet.");
  $("depths").replaceChildren(...rows.map(([tries, accepts], i) => {
    const row = make("li"), bar = make("span", "bar"), part = make("i");
    part.style.width = `${100 * accepts / tries}%`;
    bar.append(part);
    const text = make("span");
    text.append(make("b", "", percent(accepts / tries)), " ",
      make("span", "count", `${fixed(accepts)} of ${fixed(tries)}`));
    row.append(make("span", "", `depth ${i + 1}`), bar, text);
    row.title = `Of ${count(tried[0], "round")} that drafted, ${fixed(tries)} did so at least `
      + `${i + 1} deep; in ${fixed(accepts)} of those `
      + `${i ? `the first ${i + 1} drafts were` : "the first draft was"} accepted.`;
    return row;
  }));
}

// --- batch and strategy over time ----------------------------------------------------------------

/** The colour of a strategy: `off` is grey, the others in their order. */
function colour(about, name) {
  const drafting = Object.keys(about.strategies).filter((key) => about.strategies[key].drafted);
  const at = drafting.indexOf(name);
  return `var(--s${at < 0 ? 0 : 1 + at % 6})`;
}

function drawStrategies(live) {
  const {about} = live, ticks = sinceFirst(live.ticks);
  const slots = sum(about.slots), areas = {}, strips = {};
  let line = "";
  ticks.forEach((tick, x) => {
    const rounds = sum(Object.values(tick.by));
    const height = 100 * Math.min(tick.bucket / slots, 1);
    let below = 0;
    for (const name of Object.keys(about.strategies)) {
      const share = rounds ? (tick.by[name] ?? 0) / rounds : 0;
      if (!share) continue;
      const box = (tall, base) =>
        `M${x} ${(base - tall * below).toFixed(2)}h1v${(-tall * share).toFixed(2)}h-1z`;
      if (height) areas[name] = (areas[name] ?? "") + box(height, 100);
      strips[name] = (strips[name] ?? "") + box(10, 10);
      below += share;
    }
    const y = (100 - 100 * Math.min(tick.running / slots, 1)).toFixed(1);
    line += `${x ? "L" : "M"}${x} ${y}H${x + 1}`;
  });
  const paths = (found) => Object.entries(found).map(([name, d]) =>
    ["path", {d, class: "area", "data-strategy": name}]);
  const wide = Math.max(ticks.length, 1), half = slots > 1 ? Math.ceil(slots / 2) : 0;
  const level = 100 - 100 * half / slots;
  draw($("batch"), [
    ...paths(areas), ["path", {d: `M0 ${level}H${wide}`, class: "grid"}],
    ["path", {d: line, class: "line halo"}], ["path", {d: line, class: "line"}],
  ]);
  draw($("strip"), paths(strips));
  $("batch").setAttribute("viewBox", `0 0 ${wide} 100`);
  $("strip").setAttribute("viewBox", `0 0 ${wide} 10`);
  for (const node of document.querySelectorAll("path[data-strategy]")) {
    node.style.fill = colour(about, node.dataset.strategy);
  }
  axis([[slots, 0], ...(half ? [[half, level]] : []), [0, 100]]);
  say($("chart-begin"), `${secondsOf(ticks)} s ago`);
  legend(live, ticks);
}

/** Numbers beside the chart, each [number, per cent from the top]. */
function axis(marks) {
  $("batch-axis").replaceChildren(...marks.map(([number, top]) => {
    const mark = make("span", "", String(number));
    mark.style.top = `${top}%`;
    return mark;
  }));
}

function legend({about, running}, ticks) {
  const {by} = totals(ticks), all = sum(Object.values(by)), over = `last ${secondsOf(ticks)} s`;
  const names = Object.keys(about.strategies);
  const shares = names.map((name) => [name, all ? (by[name] ?? 0) / all : 0]);
  $("strategies").replaceChildren(...shares.map(([name, share]) => {
    const entry = make("span"), key = make("i");
    key.style.background = colour(about, name);
    entry.append(key, ` ${named(about, name)} ${all ? percent(share) : ""}`);
    return entry;
  }), make("span", "note", all ? `of the rounds of the ${over}` : "no round yet"));
  const said = all
    ? `Rounds of the ${over}: ${shares.map(([n, s]) => `${n} ${percent(s)}`).join(", ")}.`
    : "No round in the last minute.";
  $("strip").setAttribute("aria-label", said);
  const most = Math.max(0, ...ticks.map((tick) => tick.running));
  $("batch").setAttribute("aria-label",
    `Samples that ran in the ${over}: at most ${most}, now ${running}.`);
}

// Sentences about the numbers. They claim only what was measured.

const RECENT = 40; // ticks: ten seconds

/** How many tokens a round of it drafts. */
function drafts(about, name) {
  const {steps, drafted} = about.strategies[name] ?? {steps: 0, drafted: 0};
  if (!drafted) return "nothing";
  return drafted === steps ? count(drafted, "token") : `a tree of ${count(drafted, "token")}`;
}

/** What a name such as "4_1_5" stands for, and the name. */
function named(about, name) {
  const {steps, drafted} = about.strategies[name] ?? {steps: 0, drafted: 0};
  if (!drafted) return `plain (${name})`;
  const branches = drafted === steps ? 1 : Number(/^\d+_(\d+)_\d+$/.exec(name)?.[1] ?? 0);
  return `${steps} deep, ${branches ? count(branches, "branch", "branches") : "a tree"} (${name})`;
}

/** Of the ticks that are there, those since something ran first. */
function sinceFirst(ticks) {
  const first = ticks.findIndex((tick) => tick.running || tick.waiting || tick.rounds);
  return first < 0 ? ticks : ticks.slice(Math.max(0, Math.min(first - 2, ticks.length - LEAST)));
}

const LEAST = 20; // ticks that are shown: five seconds
const secondsOf = (ticks) => fixed(Math.max(1, sum(ticks.map((tick) => tick.seconds))));
const ago = (seconds) => seconds < 1.5 ? "a second ago"
  : seconds < 90 ? `${fixed(seconds)} s ago` : `${fixed(seconds / 60)} min ago`;

/** Sums over some ticks. */
function totals(ticks) {
  const by = {};
  for (const tick of ticks) {
    for (const [name, rounds] of Object.entries(tick.by)) by[name] = (by[name] ?? 0) + rounds;
  }
  const add = (name) => sum(ticks.map((tick) => tick[name]));
  const drafting = add("drafting");
  return {
    by, drafting, rounds: add("rounds"), tokens: add("tokens"), seconds: add("seconds"),
    accept: drafting ? add("drafting_tokens") / drafting : null,
  };
}

/** The strategy with most rounds among those that draft; null if none did. */
function mostDrafted(about, by) {
  const drafting = Object.keys(by).filter((name) => about.strategies[name]?.drafted);
  return drafting.sort((a, b) => by[b] - by[a])[0] ?? null;
}

const times = (ratio) => `${fixed(ratio, ratio < 2 ? 2 : 1)}x`;

/** Compiled sizes of what runs. */
function sizesNow(live) {
  return live.replicas.filter(({lanes}) => lanes.length).map(({bucket}) => bucket);
}

const middleOf = (values) => {
  const sorted = [...values].sort((a, b) => a - b), at = sorted.length >> 1;
  return sorted.length % 2 ? sorted[at] : (sorted[at - 1] + sorted[at]) / 2;
};

/** Whether it helps, by the controller's estimate, else by this page's runs; null: unknown.
 *
 * ratio: speed over plain decoding's. least: what it may well be. isNow: of what runs now.
 * at: which batches it is of. said: a sentence with the reason. evidence: what it rests on.
 */
function measured(live, name) {
  if (live.gains && name in live.gains.ratios) return estimated(live, name);
  const runs = live.compared.filter((run) => run.version === live.version);  // of these weights
  if (!runs.length) return null;
  const ratios = runs.map((run) => run.ratio), ratio = middleOf(ratios);
  const [least, most] = [Math.min(...ratios), Math.max(...ratios)];
  return {
    ratio, least: runs.length === 1 ? 0 : least, isNow: true, at: ", one sample alone",
    said: `Generation is ${times(ratio)} as fast as plain decoding, for one sample alone.`,
    evidence: runs.length === 1
      ? `Measured in one side-by-side run of this page, of ${count(runs[0].tokens, "token")}.`
      : `Measured in ${runs.length} side-by-side runs of this page: the median; they range from `
        + `${times(least)} to ${times(most)}.`,
  };
}

function estimated(live, name) {
  const {gains} = live, {size} = gains;
  const ratio = gains.ratios[name], least = ratio * (1 - gains.slack[name]);
  const now = sizesNow(live), isNow = now.includes(size);
  const [cost, tokens] = [gains.costs[name], ratio * gains.costs[name]].map((x) => fixed(x, 2));
  const when = isNow ? `at the batch size that runs now, ${size}`
    : `at batch size ${size}, as of ${ago(gains.age)}`;
  const others = isNow || !now.length ? ""
    : ` At size ${now.join(", ")}, which runs now, it has not been measured.`;
  const drafting = gains.chunks[name]
    ? `${count(gains.chunks[name], "chunk")} of rounds at size ${size} that drafted so`
    : `its calibration at the start (no chunk at size ${size} drafted so since)`;
  const doubt = ratio - least < 0.02 ? ""
    : ` Should plain decoding have become cheaper meanwhile, it is at least ${times(least)}.`;
  return {
    ratio, least, isNow, at: ` at size ${size}${isNow ? "" : `, ${ago(gains.age)}`}`,
    said: `Such a round takes ${cost}x as long as a plain one and brings ${tokens} tokens per `
      + `sample in place of 1. So it is ${tokens} / ${cost} = ${times(ratio)} as fast as plain `
      + `decoding, ${when}.${others}`,
    evidence: `Estimated by the controller from ${drafting} and `
      + `${count(gains.chunks.off, "plain one")}; the latest count most.${doubt}`,
  };
}

/** The verdict on a strategy: [kind, headline, sentence, evidence]. */
function judged(live, name) {
  const known = measured(live, name);
  if (known === null) {
    return ["unknown", "Whether it is faster is not known yet",
      "Whether that is faster than plain decoding is not known yet, for a pass over drafts costs "
      + "more than a plain one: run a prompt side by side below to measure it.", ""];
  }
  const {ratio, least, isNow, at, said, evidence} = known, fast = `${times(ratio)} as fast${at}`;
  if (ratio > 1.02 && least <= 1) {
    return ["good", `Speculation ${isNow ? "seems" : "seemed"} to help: about ${fast}`,
      said, evidence];
  }
  const [kind, now, then] = ratio > 1.02 ? ["good", "helps", "helped"]
    : ratio < 0.98 ? ["bad", "does not help", "did not help"]
      : ["unknown", "makes no difference", "made no difference"];
  return [kind, `Speculation ${isNow ? now : then}: ${fast}`, said, evidence];
}

/** [verdict, headline, sentences] on a server whose state is not `ok`. */
function troubled(live) {
  const {state, error, outstanding, lastState} = live;
  const left = count(outstanding ?? 0, "sample");
  const said = {
    connecting: ["Connecting to the server", ""],
    key: ["The server wants its API key", "Enter it above to see what the server does."],
    gone: lastState === "draining"
      ? ["The server has shut down", "It let what ran finish first. This page asks again every few "
        + "seconds, in case it is started again; the numbers below are the last that it sent."]
      : ["The server went away", "It does not answer. This page asks again every few seconds; the "
        + "numbers below are the last that it sent."],
    dead: ["The engine has died",
      `${error ? `${error}. ` : ""}Every request is refused; restart the server.`],
    draining: ["The server is shutting down",
      `It takes no new requests and lets what runs finish: ${left} to go.`],
    asleep: ["The server sleeps",
      "Its weights are in host memory, and requests are refused until POST /wake."],
  }[state];
  return said ? ["bad", ...said] : null;
}

/** What the server did last, in the past tense; for when nothing runs. */
function idle(live) {
  const {about, totals: all} = live;
  const name = mostDrafted(about, all.by);
  if (!all.rounds) {
    return ["unknown", "Nothing runs",
      "No request has come yet. Send one, or use the prompt below."];
  }
  if (name === null) {
    return ["unknown", "Nothing runs", "Since the server started nothing was drafted: each forward "
      + "pass of the policy brought one token per sample."];
  }
  const [kind, headline, sentence, evidence] = judged(live, name);
  const then = measured(live, name) ? `Nothing runs. ${headline}` : "Nothing runs";
  const bring = measured(live, name) ? "" : "Since the server started a round that drafted brought "
    + `${fixed(all.drafting_tokens / all.drafting, 2)} tokens per sample; a plain one brings 1. `;
  return [kind, then, `When something runs, speculation drafts ${drafts(about, name)} per round, `
    + `${named(about, name)}. ${bring}${sentence}`, evidence];
}

/** [verdict, headline, sentences, evidence]; the last may be missing. */
function inWords(live) {
  const trouble = troubled(live);
  if (trouble) return trouble;
  const {about} = live;
  if (!Object.values(about.strategies).some((strategy) => strategy.drafted)) {
    return ["unknown", "Speculation is off on this server",
      "Each forward pass of the policy brings one token per sample."];
  }
  const recent = totals(live.ticks.slice(-RECENT));
  if (!live.running && !recent.rounds) return idle(live);
  if (!recent.rounds) {
    const next = count(live.running, "sample");
    return ["unknown", "Prompts are being read", `${next} will start next.`];
  }
  if (!recent.drafting) return plainly(live, mostDrafted(about, recent.by));
  const name = mostDrafted(about, recent.by) ?? mostDrafted(about, live.totals.by);
  const [kind, headline, sentence, evidence] = judged(live, name);
  const brings = measured(live, name) ? ""
    : `In the last ${secondsOf(live.ticks.slice(-RECENT))} s such a round brought `
      + `${fixed(recent.accept, 2)} tokens per sample; a plain one brings 1. `;
  return [kind, headline, `Speculation drafts ${drafts(about, name)} per round, `
    + `${named(about, name)}, which the policy checks in one forward pass. ${brings}${sentence}`
    + plainShare(live), evidence];
}

/** How much of what the chart shows was plain decoding, where that is notable. */
function plainShare({about, ticks}) {
  const shown = sinceFirst(ticks), {by} = totals(shown), all = sum(Object.values(by));
  const plain = sum(Object.keys(by).filter((n) => !about.strategies[n]?.drafted).map((n) => by[n]));
  return plain < 0.1 * all ? "" : ` In the last ${secondsOf(shown)} s ${percent(plain / all)} of `
    + "the rounds were plain, as the chart shows.";
}

/** While rounds run and none drafts. */
function plainly(live, name) {
  const lanes = live.replicas.flatMap((replica) => replica.lanes);
  const optedOut = lanes.length > 0 && lanes.every((lane) => !lane[6]);
  const once = "Each forward pass of the policy brings one token per sample.";
  if (optedOut || name !== null) {
    return ["unknown", "Nothing is drafted right now",
      `The requests that run ask for plain decoding. ${once}`];
  }
  if (live.about.controller === null) return ["unknown", "Nothing is drafted right now", once];
  const ratios = Object.entries(live.gains?.ratios ?? {}).filter(([arm]) => arm !== "off");
  const [best, ratio] = ratios.sort((a, b) => b[1] - a[1])[0] ?? [null, null];
  const why = best === null ? "" : ` By its estimate ${named(live.about, best)} `
    + `${sizesNow(live).includes(live.gains.size) ? "would be" : `was, ${ago(live.gains.age)},`} `
    + `${times(ratio)} as fast at size ${live.gains.size}.`;
  return ["unknown", "Nothing is drafted right now",
    `The controller (${live.about.controller}) has chosen plain decoding.${why} ${once}`];
}

// What the numbers say, in sentences. Nothing is claimed that was not measured.

const RECENT = 40; // ticks: ten seconds

/** "4_1_5" as what it drafts. */
function drafts(about, name) {
  const {steps, drafted} = about.strategies[name] ?? {steps: 0, drafted: 0};
  if (!drafted) return "nothing";
  if (drafted === steps) return count(drafted, "token");
  return `a tree of ${count(drafted, "token")}, ${steps} deep,`;
}

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

/** Whether it helps, as far as anybody measured: {ratio, source}, or null. */
function measured(live, name) {
  const gains = live.gains;
  if (gains && name in gains.ratios) {
    return {
      ratio: gains.ratios[name],
      source: "by the controller's own measurements of the time per round and of acceptance, with "
        + `${count(gains.batch, "sample")} in the batch`,
    };
  }
  const runs = live.compared.filter((run) => run.version === live.version);  // of these weights
  if (!runs.length) return null;
  const ratios = runs.map((run) => run.ratio).sort((a, b) => a - b);
  const middle = ratios.length >> 1;
  const ratio = ratios.length % 2 ? ratios[middle] : (ratios[middle - 1] + ratios[middle]) / 2;
  const what = runs.length === 1
    ? `in the side-by-side run of this page (one sample of ${count(runs[0].tokens, "token")})`
    : `in ${runs.length} side-by-side runs of this page (their median; one sample at a time)`;
  return {ratio, source: what};
}

/** The verdict on a strategy: [kind, headline, sentence]. */
function judged(live, name) {
  const known = measured(live, name);
  if (known === null) {
    return ["unknown", "Whether it is faster is not known yet",
      "Whether that is faster than plain decoding is not known yet, for a pass over drafts costs "
      + "more than a plain one: run a prompt side by side below to measure it."];
  }
  const {ratio, source} = known;
  if (ratio > 1.02) {
    return ["good", `Speculation helps: ${times(ratio)} as fast`,
      `This makes generation ${times(ratio)} as fast as plain decoding, ${source}.`];
  }
  const word = ratio < 0.98 ? "Speculation does not help" : "Speculation makes no difference";
  return [ratio < 0.98 ? "bad" : "unknown", `${word}: ${times(ratio)} as fast`,
    `Even so, generation is ${times(ratio)} as fast as plain decoding, ${source}.`];
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
      "Its weights lie in host memory and requests are refused until somebody wakes it."],
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
  const accept = all.drafting_tokens / all.drafting;
  const [kind, headline, sentence] = judged(live, name);
  const then = measured(live, name) ? `Nothing runs. ${headline}` : "Nothing runs";
  return [kind, then, `When something runs, speculation drafts ${drafts(about, name)} per round `
    + `(${name}). Since the server started each forward pass of the policy that checked drafts has `
    + `yielded ${fixed(accept, 2)} tokens per sample, where plain decoding yields 1. ${sentence}`];
}

/** [verdict, headline, sentences]. */
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
  const share = recent.drafting / recent.rounds;
  const [kind, headline, sentence] = judged(live, name);
  const others = share > 0.98 ? "" : ` ${percent(1 - share)} of the rounds drafted nothing.`;
  return [kind, headline, `Speculation drafts ${drafts(about, name)} per round (${name}), and each `
    + `forward pass of the policy then yields ${fixed(recent.accept, 2)} tokens per sample, where `
    + `plain decoding yields 1.${others} ${sentence}`];
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
  const why = best === null ? "" : ` By its own measurements ${best} would make generation `
    + `${times(ratio)} as fast with ${count(live.gains.batch, "sample")} in the batch.`;
  return ["unknown", "Nothing is drafted right now",
    `The controller (${live.about.controller}) has chosen plain decoding.${why} ${once}`];
}

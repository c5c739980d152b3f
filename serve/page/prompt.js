// The prompt box: tokens coloured by how they came, and the same prompt without speculation beside.

let leaving = null; // aborts the requests that run
let turns = 0; // side-by-side runs: who goes first alternates
let isNew = true; // until what the server takes is known

const MEANS = {draft: "drafted and accepted", bonus: "bonus", plain: "plain, nothing was drafted"};

function updateForm() {
  const drafts = live.about && Object.values(live.about.strategies).some((s) => s.drafted);
  $("go").disabled = leaving !== null || live.state !== "ok";
  $("stop").hidden = leaving === null;
  $("compare").disabled = !drafts;
  if (!live.about || !isNew) return;
  isNew = false;
  $("chat-switch").hidden = !live.about.has_chat_template;
  if (!$("prompt").value) $("prompt").value = live.about.example;
  $("max-tokens").max = live.about.max_len;
  $("max-tokens").value = Math.min(200, live.about.max_len >> 1);
}

/** The token ids of a text as the user's message, by the chat template. */
async function idsOfMessage(content, signal) {
  const response = await fetch("tokenize", {
    method: "POST", headers: headers(), signal,
    body: JSON.stringify({messages: [{role: "user", content}]}),
  });
  if (!response.ok) throw new Error(await reason(response));
  return (await response.json()).tokens;
}

/** The body of a request; throws what is wrong with the fields. */
async function asked(seed, signal) {
  const text = $("prompt").value;
  let prompt = text;
  if (live.about.has_chat_template && $("chat").checked && text.length) {
    prompt = await idsOfMessage(text, signal);
  } else if (!live.about.has_tokenizer) {
    prompt = text.trim().split(/[\s,]+/).map(Number);
    const whole = prompt.every(Number.isInteger);
    if (!whole) throw new Error("The model has no tokenizer: write token ids.");
  }
  if (!text.length) throw new Error("The prompt is empty.");
  return {
    prompt, seed, max_tokens: Number($("max-tokens").value),
    temperature: Number($("temperature").value),
    stream: true, logprobs: 0, return_token_ids: true, return_spec_details: true,
  };
}

// --- one answer ----------------------------------------------------------------------------------

const fresh = () => new TextDecoder("utf-8", {ignoreBOM: true});

/** A column to be filled. */
function column(title) {
  const box = make("section", "answer"), track = make("div", "track");
  const bars = [make("i", "wait"), make("i")]; // until the first tokens, and after them
  const time = make("p", "time"), note = make("p", "note"), tokens = make("p", "tokens");
  box.append(make("h3", "", title), time, track, note, tokens);
  track.append(...bars);
  tokens.tabIndex = 0;
  tokens.setAttribute("role", "region");
  tokens.setAttribute("aria-label", `Answer ${title.toLowerCase()}`);
  return {box, bars, time, note, tokens, spans: [], decoder: fresh()};
}

/** What a token adds to the text; some are spelt as bytes, since they are parts of characters. */
function decoded(view, text) {
  const spelt = /^bytes:((?:\\x[0-9a-f]{2})+)$/.exec(text);
  const bytes = spelt ? spelt[1].slice(2).split("\\x").map((pair) => parseInt(pair, 16))
    : new TextEncoder().encode(text);
  return view.decoder.decode(new Uint8Array(bytes), {stream: true});
}

function append(view, texts, origins, ids) {
  texts.forEach((text, i) => {
    const shown = decoded(view, text).replaceAll("\n", "↵\n");
    // A token that completes no character has a place all the same.
    const kind = /^<\|.*\|>$/.test(text) ? " special" : shown ? "" : " part";
    const span = make("span", `token ${origins[i]}${kind}`, shown || "·");
    span.title = `token ${view.spans.length + 1}, id ${ids[i]}: ${MEANS[origins[i]]}`;
    span.dataset.origin = origins[i];
    view.spans.push(span);
    view.tokens.append(span);
  });
}

/** Runs a request into a column. Returns its token ids, seconds, and what speculation did. */
async function answer(view, body, signal) {
  const began = performance.now();
  const found = {ids: [], origins: [], details: null, first: null, atOnce: 0, seconds: 0};
  const response = await fetch("v1/completions", {
    method: "POST", headers: headers(), body: JSON.stringify(body), signal,
  });
  if (!response.ok) throw new Error(await reason(response));
  for await (const text of eventsOf(response)) {
    if (text === "[DONE]") break;
    const event = JSON.parse(text);
    if (event.error) throw new Error(event.error.message);
    const [choice] = event.choices;
    const ids = choice.token_ids ?? [], {origins, ...details} = choice.spec_details;
    found.seconds = (performance.now() - began) / 1000;
    if (ids.length && found.first === null) {
      [found.first, found.atOnce] = [found.seconds, ids.length];
    }
    found.ids.push(...ids);
    found.origins.push(...origins);
    append(view, choice.logprobs?.tokens ?? [], origins, ids);
    if (choice.finish_reason) found.details = details;
    const speed = fixed(found.ids.length / found.seconds);
    say(view.time, `${fixed(found.seconds, 2)} s · ${speed} tokens/s in all`);
  }
  if (!found.details) throw new Error("The answer broke off.");
  say(view.note, summary(found));
  return found;
}

async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answers ${response.status}.`;
  }
}

/** Tokens per second after those that came first; null where all came at once. */
function speedAfter({ids, first, atOnce, seconds}) {
  return ids.length > atOnce && seconds > first ? (ids.length - atOnce) / (seconds - first) : null;
}

function summary(found) {
  const {ids, origins, details, first, atOnce, seconds} = found, after = speedAfter(found);
  const of = (name) => origins.filter((origin) => origin === name).length;
  const parts = ["draft", "bonus", "plain"].filter(of).map((name) => `${of(name)} ${name}`);
  const rounds = details.rounds
    ? `; ${count(details.rounds, "round")} of ${fixed(details.accept_length, 2)} tokens` : "";
  const rest = after === null ? ""
    : `, the other ${fixed(ids.length - atOnce)} in ${fixed(seconds - first, 2)} s: `
      + `${fixed(after)} tokens/s`;
  return `The first ${count(atOnce, "token")} after ${fixed(1000 * first)} ms${rest}. `
    + `${count(ids.length, "token")}: ${parts.join(", ")}${rounds}.`;
}

// --- side by side --------------------------------------------------------------------------------

/** Runs one side, alone; once more if a program was compiled meanwhile. */
async function side(view, body, signal) {
  for (let attempt = 0; ; attempt += 1) {
    const counts = await settled();
    const before = {...live.totals, built: live.compilations};
    const found = await answer(view, body, signal);
    const clean = counts && await settled();
    found.built = clean && live.compilations !== before.built;
    if (found.built && attempt === 0) {
      view.tokens.replaceChildren();
      [view.spans, view.decoder] = [[], fresh()];
      say(view.note, "A program was compiled meanwhile: measured once more.");
      continue;
    }
    found.ran = Object.keys(live.totals?.by ?? {}).filter(
      (name) => live.totals.by[name] > (before.by?.[name] ?? 0));
    found.others = live.totals?.tokens - before.tokens !== found.ids.length;
    found.clean = clean;
    return found;
  }
}

/** Where two answers differ first; null: they are the same. */
function difference(one, other) {
  const length = Math.max(one.length, other.length);
  for (let i = 0; i < length; i += 1) if (one[i] !== other[i]) return i;
  return null;
}

function showSame(views, drafted, plain) {
  const at = difference(drafted.ids, plain.ids);
  $("same").dataset.verdict = at === null ? "good" : "bad";
  if (at === null) {
    const all = fixed(plain.ids.length);
    say($("same"), `Same tokens: all ${all} are equal, with and without speculation.`);
    return;
  }
  for (const view of views) view.spans[at]?.classList.add("differs");
  const mode = live.about.acceptance;
  const why = ["coupled", "greedy"].includes(mode)
    ? "Two tokens may be so nearly equally likely that floating point decides; else it is a bug."
    : `Acceptance '${mode}' keeps the distribution of the text, not each token.`;
  say($("same"), `Different tokens: the first ${fixed(at)} are equal, then token ${fixed(at + 1)} `
    + `differs. ${why}`);
}

/** Why the times of two answers say nothing of speculation; empty: they do. */
function doubtOf(drafted, plain) {
  if (!drafted.clean || !plain.clean) return "the server did not say what else it did meanwhile";
  if (drafted.built || plain.built) return "programs were compiled meanwhile";
  if (drafted.others || plain.others) return "other samples ran at the same time";
  const drafts = (name) => live.about.strategies[name]?.drafted;
  const drafting = plain.ran.filter(drafts);
  if (drafting.length) {
    return "this server has no program for plain decoding, and the run without speculation went "
      + `through that of ${drafting.join(", ")}, which costs more (list off in `
      + "speculation.control.strategies)";
  }
  if (difference(drafted.ids, plain.ids) !== null) return "the answers differ";
  return drafted.ran.some(drafts) ? "" : "nothing was drafted";
}

/** Says how the times compare, or why they do not.
 *
 * what: was asked, for those that ask it again. first: who ran first.
 */
function showRatio(views, drafted, plain, what, first) {
  const longest = Math.max(drafted.seconds, plain.seconds);
  [drafted, plain].forEach((found, i) => {
    const waited = found.first ?? found.seconds, [wait, rest] = views[i].bars;
    wait.style.width = `${100 * waited / longest}%`;
    rest.style.width = `${100 * (found.seconds - waited) / longest}%`;
  });
  const [a, b] = [drafted, plain].map((found) => fixed(found.seconds, 2));
  const took = `With speculation ${a} s, without ${b} s`, doubt = doubtOf(drafted, plain);
  if (doubt) {
    say($("ratio"), `${took}. That says nothing about speculation, for ${doubt}.`);
    return;
  }
  const ratio = plain.seconds / drafted.seconds;
  const speeds = [drafted, plain].map(speedAfter);
  const after = speeds.includes(null) ? null : speeds[0] / speeds[1];
  const {version} = live;
  live.compared.push({ratio, after, what, first, tokens: plain.ids.length, version});
  const then = after === null ? "" : ` After them: ${times(after)} as fast.`;
  say($("ratio"), `${took}: ${times(ratio)} as fast, with the wait for the first tokens.${then} `
    + `One run each, ${first} speculation first; the next press turns the order round.`);
  showSpread(live.compared.filter((run) => run.version === version && run.what === what));
}

/** What several presses with the same prompt and settings came to. */
function showSpread(runs) {
  if (runs.length < 2) return;
  const range = (values) => `${times(middleOf(values))} (${times(Math.min(...values))} to `
    + `${times(Math.max(...values))})`;
  const after = runs.map((run) => run.after).filter((value) => value !== null);
  const then = after.length ? `; after the first tokens ${range(after)}` : "";
  say($("spread"), `${fixed(runs.length)} pairs of runs of this prompt so far, median (least to `
    + `most): in all ${range(runs.map((run) => run.ratio))}${then}.`);
}

async function sideBySide(body, signal) {
  const views = [column("With speculation"), column("Without speculation")];
  $("answers").replaceChildren(...views.map(({box}) => box));
  const bodies = [body, {...body, speculative: false}], found = [];
  const order = turns % 2 ? [1, 0] : [0, 1];
  turns += 1;
  for (const i of order) {
    say($("try-status"), `Running ${i ? "without" : "with"} speculation, alone`);
    found[i] = await side(views[i], bodies[i], signal);
  }
  const what = JSON.stringify([body.prompt, body.max_tokens, body.temperature]);
  showSame(views, ...found);
  showRatio(views, ...found, what, order[0] ? "without" : "with");
}

async function alone(body, signal) {
  const view = column("With speculation");
  $("answers").replaceChildren(view.box);
  say($("try-status"), "Running");
  await answer(view, body, signal);
}

$("try").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (leaving) return;
  for (const id of ["try-status", "try-error", "same", "ratio", "spread"]) say($(id), "");
  leaving = new AbortController();
  updateForm();
  try {
    const given = $("seed").value;
    const seed = given === "" ? Math.floor(Math.random() * 2 ** 31) : Number(given);
    const body = await asked(seed, leaving.signal);
    const both = $("compare").checked && !$("compare").disabled;
    await (both ? sideBySide : alone)(body, leaving.signal);
    say($("try-status"), `Done; seed ${seed}.`);
  } catch (error) {
    say($("try-status"), "");
    say($("try-error"), leaving.signal.aborted ? "Stopped." : error.message);
  }
  leaving = null;
  show();
});

$("stop").addEventListener("click", () => leaving?.abort());
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("try").requestSubmit();
});

watch();

// The event stream of the server, and the state that the page shows.

const RETRY = 2000; // ms
const SPEAK_EVERY = 4000; // ms between two sentences, which screen readers read out

const live = {
  state: "connecting", lastState: "connecting", about: null, ticks: [], compared: [], events: 0,
};
const waiting = []; // resolved by the next event
let spoken = 0, spokenState = "";

/** Waits until the server's counters include all that has ended; false: no event came. */
async function settled() {
  for (let i = 0; i < 2; i += 1) {
    const came = new Promise((resolve) => waiting.push(() => resolve(true)));
    if (!await Promise.race([came, later(10000).then(() => false)])) return false;
  }
  return true;
}

function take(event) {
  const {ticks, ...now} = event;
  if (event.about) live.ticks = [];
  Object.assign(live, now);
  live.ticks = [...live.ticks, ...ticks].slice(-TICKS);
  live.events += 1;
  for (const resolve of waiting.splice(0)) resolve();
  show();
}

function become(state) {
  if (live.state !== state) live.lastState = live.state;
  live.state = state;
  show();
}

/** Reads the event stream and reconnects, except while the tab is hidden. */
async function watch() {
  if (document.body.dataset.key === "yes" && !sessionStorage.getItem(KEY)) {
    become("key");
    await askForKey("");
  }
  for (;;) {
    while (document.hidden) await new Promise((resolve) => { onVisible = resolve; });
    const leave = new AbortController();
    onHidden = () => leave.abort();
    try {
      const options = {headers: headers(), cache: "no-store", signal: leave.signal};
      const response = await fetch("live", options);
      if (response.status === 401) {
        become("key");
        await askForKey("The server does not know this key.");
        continue;
      }
      if (!response.ok) throw new Error(`/live answers ${response.status}`);
      for await (const text of eventsOf(response)) take(JSON.parse(text));
      become("gone");
    } catch (error) {
      if (!leave.signal.aborted) become("gone");
    }
    if (!leave.signal.aborted) await later(RETRY);
  }
}

let onVisible = () => {}, onHidden = () => {};
document.addEventListener("visibilitychange", () => (document.hidden ? onHidden() : onVisible()));

// --- shown ---------------------------------------------------------------------------------------

const STATES = {
  connecting: "connecting", key: "key wanted", ok: "serving", asleep: "asleep",
  draining: "shutting down", dead: "engine died", gone: "went away",
};

function show() {
  say($("state"), live.state === "ok" && !live.running ? "idle" : STATES[live.state]);
  $("state").dataset.state = live.state;
  if (live.about) {
    say($("model"), live.model ?? "");
    document.title = `${live.model} · specjax`;
    drawAll(live);
    const {controller, acceptance} = live.about;
    say($("footer"), ` · weights version ${live.version}`
      + ` · ${fixed(live.compilations)} programs compiled`
      + ` · controller: ${controller ?? "none"} · acceptance: ${acceptance ?? "none"}`
      + live.alarms.map((alarm) => ` · alarm: ${alarm}`).join(""));
  }
  const stale = ["gone", "key"].includes(live.state);
  document.querySelector(".columns").classList.toggle("stale", stale);
  speak();
  updateForm();
}

/** The sentences change at once when the state or the batch size does, else now and then. */
function speak() {
  const busy = live.running > 0 ? "busy" : "idle";
  const sizes = live.about && [busy, ...sizesNow(live), live.gains?.size];
  const state = [live.state, sizes, live.compared.length].join();
  const now = performance.now();
  if (state === spokenState && now < spoken + SPEAK_EVERY) return;
  if (!live.about && live.state === "ok") return;
  [spoken, spokenState] = [now, state];
  const [verdict, headline, sentences, evidence] = inWords(live);
  say($("verdict"), headline);
  $("verdict").dataset.verdict = verdict;
  say($("words"), sentences);
  say($("evidence"), evidence ?? "");
}

"use strict";
// Shared by all scripts: elements, numbers, the key, event streams.

const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

/** An element with classes and text. Text is never read as HTML, whatever its source. */
function make(tag, classes = "", text = "") {
  const node = document.createElement(tag);
  if (classes) node.className = classes;
  if (text) node.textContent = text;
  return node;
}

/** Sets the text if it changes, so that screen readers read changes alone. */
function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** The children of an SVG element, as [tag, attributes]. */
function draw(svg, shapes) {
  svg.replaceChildren(...shapes.map(([tag, attributes]) => {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    return node;
  }));
}

function fixed(value, digits = 0) {
  return value.toLocaleString("en", {minimumFractionDigits: digits, maximumFractionDigits: digits});
}

const percent = (share) => `${Math.round(100 * share)}%`;
const count = (n, one, many = `${one}s`) => `${fixed(n)} ${n === 1 ? one : many}`;
const sum = (values) => values.reduce((a, b) => a + b, 0);
const later = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// --- the key -------------------------------------------------------------------------------------

const KEY = "specjax-api-key"; // in sessionStorage: gone when the tab is closed
let keyGiven = null; // resolves when the form was sent

/** Shows the form; resolves when a key was entered. */
function askForKey(why) {
  say($("key-why"), why);
  if (keyGiven) return keyGiven;
  $("key-form").hidden = false;
  $("key").focus();
  keyGiven = new Promise((resolve) => {
    $("key-form").onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, $("key").value);
      $("key").value = "";
      $("key-form").hidden = true;
      keyGiven = null;
      resolve();
    };
  });
  return keyGiven;
}

function headers() {
  const key = sessionStorage.getItem(KEY);
  return {"Content-Type": "application/json", ...(key ? {Authorization: `Bearer ${key}`} : {})};
}

// --- server-sent events --------------------------------------------------------------------------

/** The data of each event of an answer. */
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) if (event.startsWith("data: ")) yield event.slice(6);
  }
}

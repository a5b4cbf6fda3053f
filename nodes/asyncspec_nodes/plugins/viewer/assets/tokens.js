// The answer, token by token. What a token says comes from a model: it is text, never markup.
const strip = document.getElementById("tokens");
const shown = [];

function showTokens() {
  const several = new Set(tokens.request).size > 1, texts = tokens.text.some(Boolean);
  const blocks = new Map();
  for (let i = 0; i < tokens.at.length; i++) {
    const request = tokens.request[i];
    // A block a request, which the browser lays out only when it comes into view.
    if (!blocks.has(request)) {
      blocks.set(request, element("div", undefined, strip));
      if (several) element("span", `#${request}`, blocks.get(request)).className = "request";
    }
    // Text comes by emission, at its first token: the others bear none of their own.
    const text = texts ? tokens.text[i] : `${tokens.token[i]} `;
    const item = element("span", text, blocks.get(request));
    item.setAttribute("role", "option");
    item.setAttribute("aria-selected", "false");
    item.id = `token-${i}`;
    item.dataset.token = i;
    item.className = `${tokens.hit[i] ? "hit" : "miss"}${text ? "" : " mute"}`;
    const label = `token ${tokens.index[i] + 1} (${tokens.token[i]}), ${tokens.hit[i] ? "hit" : "miss"}, ` +
      `depth ${tokens.depth[i]}, ${milliseconds(tokens.at[i])}`;
    item.title = label;
    if (!text) item.setAttribute("aria-label", label);
    shown.push(item);
  }
  document.getElementById("answer").hidden = tokens.at.length === 0;
}

function markTokens() {
  const same = new Set(emittedBy.get(chosen.lifetime) ?? []);
  for (const item of strip.querySelectorAll("[aria-selected=true], .same")) {
    item.setAttribute("aria-selected", "false");
    item.classList.remove("same");
  }
  for (const i of same) shown[i].classList.add("same");
  const current = shown[chosen.token];
  if (!current) {
    strip.removeAttribute("aria-activedescendant");
    return;
  }
  current.setAttribute("aria-selected", "true");
  strip.setAttribute("aria-activedescendant", current.id);
  // Within the strip only: the page stays where it is.
  const above = current.offsetTop - strip.clientHeight / 2;
  if (current.offsetTop < strip.scrollTop || current.offsetTop > strip.scrollTop + strip.clientHeight - 24) {
    strip.scrollTop = above;
  }
}

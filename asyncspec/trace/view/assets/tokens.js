// The answer, token by token. What a token says comes from a model: it is text, never markup.
const strip = document.getElementById("tokens");
const shown = [];

function showTokens() {
  const several = new Set(tokens.request).size > 1;
  let request = -1, block = null;
  for (let i = 0; i < tokens.at.length; i++) {
    // In blocks, which the browser lays out only when they come into view.
    if (tokens.request[i] !== request || i % 400 === 0) {
      block = element("span", undefined, strip);
      block.style.contentVisibility = "auto";
    }
    if (several && tokens.request[i] !== request) {
      if (request >= 0) block.append("\n");
      element("span", `#${tokens.request[i]}`, block).className = "request";
    }
    request = tokens.request[i];
    const text = tokens.text[i] || (tokens.text.some(Boolean) ? "" : `${tokens.token[i]} `);
    const item = element("span", text || "·", block);
    item.setAttribute("role", "option");
    item.setAttribute("aria-selected", "false");
    item.id = `token-${i}`;
    item.dataset.token = i;
    item.className = tokens.hit[i] ? "hit" : "miss";
    item.title = `token ${tokens.index[i] + 1} (${tokens.token[i]}), ${tokens.hit[i] ? "hit" : "miss"}, ` +
      milliseconds(tokens.at[i]);
    shown.push(item);
  }
  document.getElementById("answer").hidden = tokens.at.length === 0;
}

function markTokens() {
  const same = new Set(broughtBy.get(chosen.journey) ?? []);
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

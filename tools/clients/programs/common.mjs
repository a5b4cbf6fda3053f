// As common.py.
import { readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

export const [mode, url, text, folder] = process.argv.slice(2);
export const model = "tiny";
export const messages = [{ role: "user", content: text }];
const strings = { path: { type: "string" }, old: { type: "string" }, new: { type: "string" } };
export const parameters = { type: "object", properties: strings, required: Object.keys(strings) };
export const tool = { name: "replace", description: "Replace text in a file." };
export const tools = [{ type: "function", function: { ...tool, parameters } }];

// Packages lie in the client's folder, not beside these programs.
export const load = (name) =>
  import(pathToFileURL(createRequire(`${folder}/package.json`).resolve(name)));

export function replace({ path, old, new: by }) {
  writeFileSync(path, readFileSync(path, "utf8").replaceAll(old, by));
  return "done";
}

export async function show(pieces, textOf) {
  const texts = [];
  for await (const piece of pieces) if (textOf(piece)) texts.push(textOf(piece));
  if (texts.length < 2) throw new Error(`one piece: ${texts}`);
  console.log(texts.join(""));
}

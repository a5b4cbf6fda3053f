import { load, messages, mode, model, replace, show, text, tools, url } from "./common.mjs";

const { OpenAI } = await load("openai");
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "unused" });
if (mode === "chat") {
  const { choices } = await client.chat.completions.create({ model, messages });
  console.log(choices[0].message.content);
  if (!(await client.responses.create({ model, input: text })).output_text) process.exit(1);
} else if (mode === "stream") {
  const stream = await client.chat.completions.create({ model, messages, stream: true });
  await show(stream, (chunk) => chunk.choices[0].delta.content);
} else {
  const { function: described } = tools[0];
  const tool = { type: "function", function: { ...described, function: replace, parse: JSON.parse } };
  console.log(await client.chat.completions.runTools({ model, messages, tools: [tool] }).finalContent());
}

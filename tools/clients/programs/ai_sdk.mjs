import { load, mode, model, parameters, replace, show, text, tool, url } from "./common.mjs";

const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { generateText, jsonSchema, stepCountIs, streamText } = await load("ai");
const ask = {
  model: createOpenAICompatible({ name: "local", baseURL: `${url}/v1` })(model),
  prompt: text,
};
if (mode === "stream") await show(streamText(ask).textStream, (piece) => piece);
else {
  const { description } = tool;
  const tools = { replace: { description, inputSchema: jsonSchema(parameters), execute: replace } };
  const answer = await generateText({ ...ask, tools, stopWhen: stepCountIs(3) });
  console.log(answer.text);
}

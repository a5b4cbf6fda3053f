import anthropic
from common import FUNCTION, KEY, MESSAGES, MODE, MODEL, PARAMETERS, URL, replace, say, show

client = anthropic.Anthropic(base_url=URL, api_key=KEY)
ask = {"model": MODEL, "max_tokens": 999, "messages": MESSAGES}
if MODE == "chat":
    say(client.messages.create(**ask).content[0].text)
elif MODE == "stream":
    with client.messages.stream(**ask) as stream:
        show(stream.text_stream)
else:
    described = {"name": FUNCTION["name"], "description": FUNCTION["description"]}
    ask["tools"] = [{**described, "input_schema": PARAMETERS}]
    while (answer := client.messages.create(**ask)).stop_reason == "tool_use":
        MESSAGES.append({"role": "assistant", "content": answer.content})
        results = [
            {"type": "tool_result", "tool_use_id": part.id, "content": replace(**part.input)}
            for part in answer.content
            if part.type == "tool_use"
        ]
        MESSAGES.append({"role": "user", "content": results})
    say(answer.content[0].text)

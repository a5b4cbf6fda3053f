import json

import openai
from common import FUNCTION, KEY, MESSAGES, MODE, MODEL, TEXT, URL, replace, say, show

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY)
if MODE == "chat":
    say(client.chat.completions.create(model=MODEL, messages=MESSAGES).choices[0].message.content)
    say(client.responses.create(model=MODEL, input=TEXT).output_text)
elif MODE == "stream":
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES) as stream:
        show(event.delta for event in stream if event.type == "content.delta")
    events = client.responses.create(model=MODEL, input=TEXT, stream=True)
    show(event.delta for event in events if event.type == "response.output_text.delta")
else:
    tools = [{"type": "function", "function": FUNCTION}]
    while True:
        asked = client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=tools)
        message = asked.choices[0].message
        MESSAGES.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            text = replace(**json.loads(call.function.arguments))
            MESSAGES.append({"role": "tool", "tool_call_id": call.id, "content": text})
    say(message.content)

import json

import litellm
from common import FUNCTION, KEY, MESSAGES, MODE, MODEL, URL, replace, say, show

litellm.drop_params = False
PROVIDERS = {"openai": f"{URL}/v1", "ollama_chat": URL, "ollama": URL, "anthropic": URL}
for provider, base in PROVIDERS.items():
    ask = {"model": f"{provider}/{MODEL}", "api_base": base, "api_key": KEY}
    messages = list(MESSAGES)
    if MODE == "chat":
        say(litellm.completion(**ask, messages=messages).choices[0].message.content)
    elif MODE == "stream":
        chunks = litellm.completion(**ask, messages=messages, stream=True)
        show(chunk.choices[0].delta.content for chunk in chunks)
    elif provider != "ollama":  # LiteLLM renders its calls as text
        ask["tools"] = [{"type": "function", "function": FUNCTION}]
        while True:
            message = litellm.completion(**ask, messages=messages).choices[0].message
            messages.append(message)
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                text = replace(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
        say(message.content)

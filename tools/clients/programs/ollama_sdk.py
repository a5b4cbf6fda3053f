import ollama
from common import MESSAGES, MODE, MODEL, URL, replace, say, show

client = ollama.Client(host=URL)
if MODE == "chat":
    say(client.chat(MODEL, MESSAGES).message.content)
elif MODE == "stream":
    show(piece.message.content for piece in client.chat(MODEL, MESSAGES, stream=True))
else:
    while (message := client.chat(MODEL, MESSAGES, tools=[replace]).message).tool_calls:
        MESSAGES.append(message)
        for call in message.tool_calls:
            text = replace(**call.function.arguments)
            MESSAGES.append({"role": "tool", "tool_name": call.function.name, "content": text})
    say(message.content)

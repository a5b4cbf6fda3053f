from common import KEY, MESSAGES, MODE, MODEL, TEXT, URL, replace, say, show
from smolagents import OpenAIServerModel, ToolCallingAgent, tool

model = OpenAIServerModel(MODEL, api_base=f"{URL}/v1", api_key=KEY)
if MODE == "chat":
    say(model(MESSAGES).content)
elif MODE == "stream":
    show(delta.content for delta in model.generate_stream(MESSAGES))
else:
    say(ToolCallingAgent([tool(replace)], model).run(TEXT))

"""What a type checker must accept and refuse of the public functions; `make check` reads this file, nothing runs it.

mypy reports a `type: ignore` that ignores nothing, so each of them is a claim that the line is refused.
"""

import bitfit

run = bitfit.train("reviews.csv", select="bias", lr=[1e-3, 4e-3], seed=0, out="reviews.safetensors")
score: float | None = run.best.dev
runs: dict[int, bitfit.Run] = bitfit.sweep("reviews.csv", train_size=[100, 200], epochs=1)
answers: list[dict[str, object]] = bitfit.predict("reviews.safetensors", ["great film"])

bitfit.train([{"text": "great film", "label": "good"}], quiet=True)
bitfit.predict("reviews.safetensors", [{"id": 1, "text": "great film"}], quiet=True)
bitfit.predict("reviews.safetensors", (["great film"], ["good"]))
found = bitfit.evaluate("reviews.safetensors", {"test": (["great film"], ["good"])}, split="test", quiet=True)
bitfit.compare("reviews.csv", methods=["bitfit", "head"], quiet=True)

bitfit.compare("reviews.csv", method="head")  # type: ignore[call-arg]
bitfit.evaluate("reviews.safetensors", 3)  # type: ignore[arg-type]
bitfit.train("reviews.csv", epochz=1)  # type: ignore[call-arg]
bitfit.train("reviews.csv", epochs="three")  # type: ignore[arg-type]
bitfit.train(3, epochs=1)  # type: ignore[arg-type]
bitfit.train("reviews.csv", train_size=[100, 200])  # type: ignore[arg-type]
bitfit.sweep("reviews.csv", train_size=[100], epochz=1)  # type: ignore[call-arg]
bitfit.predict(3, ["great film"])  # type: ignore[call-overload]
bitfit.no_such_function()  # type: ignore[attr-defined]

"""The text that scales of an e4m3 KV cache are measured on: prose, code, numbers, a dialogue and other scripts, all short."""

CALIBRATION_TEXT = """The harbour lay quiet under a low sky. Two fishermen mended their nets and spoke of the price of diesel, \
which had risen again since Monday; neither of them looked up when the ferry came in. It carried 214 passengers, 38 cars and \
a crate of oranges that nobody had ordered.

User: How do I find the largest value of a list in Python without max()?
Assistant: Walk through it once and keep the best that you have seen:

def largest(values: list[float]) -> float:
    best = values[0]
    for value in values[1:]:
        if value > best:
            best = value
    return best

1. It reads each element once: O(n).
2. An empty list raises IndexError.

{"name": "sensor-7", "reading": -12.75, "unit": "\u00b0C", "ok": true, "tags": ["north", "roof"]}
3.14159 * 2**10 = 3216.99; 17 / 4 = 4.25; 1,000,000 - 1 = 999,999.

Le conseil se r\u00e9unit demain \u00e0 neuf heures. Die Br\u00fccke wurde 1932 gebaut und 1978 erneuert. El tren sali\u00f3 con \
retraso. \u041c\u043e\u0441\u0442 \u0437\u0430\u043a\u0440\u044b\u0442. \u4eca\u5929\u5929\u6c14\u5f88\u597d\u3002
"""

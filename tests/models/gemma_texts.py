# SPDX-License-Identifier: Apache-2.0
"""How Gemma 3 270M continues a few texts: data that transformers 5.23.0 and torch 2.13.0 made on a CPU, in float32,
with eager attention. tests/adapters/test_transformers_gemma.py makes it again.
"""

from __future__ import annotations

# The last one is longer than the window of 512 tokens. In each step the logit of the token is at least 0.019 above
# every other one. Sums in another order move a logit by 1e-4 at most, so they do not change the tokens.
PROMPTS = (
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "Water boils at a lower temperature on a mountain because",
    "Once there was a fox who lived in a forest. One day",
    "The ferry to the outer islands left twice a day in summer and once a week in winter, and nobody who lived "
    "there had ever seen a timetable that was right. On the largest island stood a school with eleven children, a "
    "bakery, two boatyards that did not speak to each other, and a post office whose clock had stopped in a "
    "storm. Marit, who sorted the letters, was asked every morning whether she would have it repaired, and every "
    "morning she answered that a clock which is right twice a day is better than a ferry. Her brother Olav built "
    "boats in the northern yard. He had learned the trade from his grandfather, a silent man who measured planks "
    "with his hands and could tell by the smell of a log how many years it had lain in water. The southern yard "
    "belonged to the Hansens. They worked with plywood and glue, and their boats were lighter, cheaper and, as "
    "Olav liked to say, forgotten sooner. The quarrel had begun over a mast. Some said that the mast had been "
    "stolen, others that it had only been lent and had broken in the hands of a man who was too proud to admit "
    "it. By now the two who had first argued about it were dead, and the mast itself stood as a flagpole before "
    "the school, painted white, with a small brass plate that named neither of them. In the spring of that year a "
    "letter came which was addressed to both yards. Marit weighed it in her hand for a long time. It carried "
    "foreign stamps with birds on them, the paper was thick, and the sender was a museum in a city of which she "
    "had only read. She could have opened it over the kettle, as people believed that she did with all the "
    "others, but she had never opened a letter in thirty years, and so she put on her coat, hung a sign on the "
    "door, and walked down to the harbour to find her brother. He was lying under a hull with a brush in his "
    "mouth. When he had read the address he wiped his fingers, turned the envelope over, and said that it would "
    "have to be read by both of them or by none. So it happened that for the first time in forty years somebody "
    "from the northern yard walked through the gate of the southern one. Old Hansen was sitting on a barrel, "
    "peeling an apple. He looked at the two of them, then at the letter, and cut the apple into three pieces. The "
    "museum, it turned out, had bought a boat. It was nine metres long, built of larch on oak, and had been found "
    "in a barn under hay, with no name on it and only a sign burnt into the keel: half of it the mark of the one "
    "yard, half of it the mark of the other. Could the yards explain, the museum asked, how such a boat had come "
    "to be built? Olav looked at Hansen, and Hansen looked at his apple. Nobody on the island had ever heard of a "
    "boat that",
)

# What continues them, greedily.
TOKENS = tuple(
    tuple(map(int, tokens.split()))
    for tokens in (
        "140 584 538 1251 236743 236771 653 538 1251 236743 236770 236787 107 144 2060 236743 236771 107 140 "
        "36208 538 1251 236743 236778 236787 107 144 2060 236743 236770 107 140 36208 538 1251 236743 236800 "
        "236787 107 144 2060 236743 236778 107 140 36208 538 1251 236743 236812 236787 107 144 2060 236743 236800 "
        "107 140 36208 538 1251 236743 236810 236787 107 144 2060 236743 236812 107 140 36208 538 1251 236743 "
        "236825 236787 107 144 2060 236743 236810 107 140 36208 538 1251 236743 236832 236787 107 144 2060 236743 "
        "236825 107 140 36208 538 1251 236743 236828 236787 107 144 2060 236743 236832 107 140 36208 538 1251 "
        "236743 236819 236787 107 144 2060 236743 236828 107 140 36208 538 1251 236743 236770",
        "529 506 3715 4204 236761 108 818 1813 528 496 13288 563 657 496 3715 4022 1547 529 506 3715 4204 236761 "
        "108 818 1813 528 496 13288 563 657 496 3718 4022 1547 529 506 3715 4204 236761 108 818 1813 528 496 "
        "13288 563 657 496 3718 4022 1547 529 506 3715 4204 236761 108 818 1813 528 496 13288 563 657 496 3718 "
        "4022 1547 529 506 3715 4204 236761 108 818 1813 528 496 13288 563 657 496 3718 4022 1547 529 506 3715 "
        "4204 236761 108 818 1813 528 496 13288 563 657 496 3718 4022 1547 529 506 3715 4204 236761 108 818 1813 "
        "528 496 13288 563 657 496 3718 4022 1547 529 506 3715 4204 236761 108 818 1813 528",
        "668 5004 496 37423 528 496 6426 236761 1293 1176 236764 623 236777 1461 531 3892 528 496 6426 1781 669 "
        "37423 1176 236764 623 236777 1461 531 3892 528 496 6426 1781 669 37423 1176 236764 623 236777 1461 531 "
        "3892 528 496 6426 1781 669 37423 1176 236764 623 236777 1461 531 3892 528 496 6426 1781 669 37423 1176 "
        "236764 623 236777 1461 531 3892 528 496 6426 1781 669 37423 1176 236764 623 236777 1461 531 3892 528 496 "
        "6426 1781 669 37423 1176 236764 623 236777 1461 531 3892 528 496 6426 1781 669 37423 1176 236764 623 "
        "236777 1461 531 3892 528 496 6426 1781 669 37423 1176 236764 623 236777 1461 531 3892 528 496 6426 1781 "
        "669 37423 1176 236764",
        "691 5284 528 506 16962 16656 236761 669 14871 1053 10636 496 9909 236764 532 506 16656 1053 1010 4173 "
        "600 625 691 496 9909 600 1053 1010 5284 528 506 15891 16656 236761 669 14871 1053 1010 4173 600 625 691 "
        "496 9909 600 1053 1010 5284 528 506 16962 16656 236761 669 14871 1053 1010 4173 600 625 691 496 9909 600 "
        "1053 1010 5284 528 506 15891 16656 236761 669 14871 1053 1010 4173 600 625 691 496 9909 600 1053 1010 "
        "5284 528 506 16962 16656 236761 669 14871 1053 1010 4173 600 625 691 496 9909 600 1053 1010 5284 528 506 "
        "15891 16656 236761 669 14871 1053 1010 4173 600 625 691 496 9909 600 1053 1010 5284 528 506 16962 16656",
    )
)

# The tokenizer's.
ODD = {
    "Hello world": (2, 9259, 1902),
    "  two  spaces\n\nnewline": (2, 138, 13498, 138, 35220, 108, 73481),
    "naïve café 日本語 😀 \t tab": (2, 1789, 238527, 560, 33443, 33375, 238582, 163543, 236743, 255968, 6937),
}

# Eager's logits of some tokens behind the last prompt: those that a window of 511 or 513 tokens moves the most, by
# 0.0147 or more.
LOGITS = {66161: -2.5166, 172516: 0.3021, 123750: 2.0182, 175696: 0.6192, 80050: 4.5347, 68164: 10.1892}

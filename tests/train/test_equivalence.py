"""Which answers are right: pairs of every kind of answer that data sets have, in both directions.

Each pair goes through the reward `math_verify` as a run calls it: the answer boxed in a completion.
"""

import pytest

from train.rewards.answers.equivalence import same_answer
from train.rewards.builtin import MATH_VERIFY, NUMBER

RIGHT = [
    (r"2\sqrt{2}", r"2\sqrt{2}"), (r"2\sqrt{2}", r"\sqrt{8}"), (r"2\sqrt{2}", "2√2"),
    (r"2\sqrt{2}", "2*sqrt(2)"), (r"\sqrt[3]{16}", r"2\sqrt[3]{2}"),
    (r"\frac{1}{\sqrt2}", r"\frac{\sqrt{2}}{2}"), (r"\frac{\pi}{4}", r"\pi/4"), ("2pi", r"2\pi"),
    (r"2\pi", "2π"), (r"\frac{\pi}{4}", r"\frac14\pi"), ("(1,2)", "(1, 2)"),
    ("(1,2)", r"\left(1,2\right)"), (r"(\frac12,3)", "(0.5, 3)"),
    ("(1,2,3)", r"\langle 1,2,3\rangle"), (r"x \geq 5", r"x \ge 5"), (r"x \geq 5", r"5 \le x"),
    (r"x \geq 5", r"[5,\infty)"), (r"[5,\infty)", r"x\geq5"), ("1<x<3", "(1,3)"),
    (r"x<2 \text{ or } x>3", r"(-\infty,2)\cup(3,\infty)"), (r"-1<x\le 3", "(-1,3]"),
    ("x>5", "5<x"), (r"x\in[1,2]", "[1,2]"), ("[1,2]", r"x\in[1,2]"), (r"2x \ge 10", r"x\ge5"),
    ("3, 5, 7", "3,5,7"), ("3, 5, 7", "7, 3, 5"), ("3, 5, 7", "3, 5 and 7"),
    ("3, 5, 7", r"\{3,5,7\}"), ("2 or 3", "2, 3"), ("x=2, x=3", "2, 3"),
    (r"1\pm\sqrt2", r"1+\sqrt{2}, 1-\sqrt{2}"), ("x=1, y=2", "y=2, x=1"), ("x=1,y=2", "(1,2)"),
    (r"\{1,2\}", r"\{2, 1\}"), (r"\left\{1,2\right\}", r"\{1,2\}"), (r"\{5\}", "5"),
    ("[1,2)", "[1, 2)"), (r"(-\infty,3]", r"(-\infty, 3]"),
    (r"(-\infty,2)\cup(3,\infty)", r"(3,\infty) \cup (-\infty,2)"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\left(\begin{array}{c}1\\2\end{array}\right)"),
    (r"\begin{pmatrix}\frac12&0\\0&1\end{pmatrix}", r"\begin{pmatrix}0.5&0\\0&1\end{pmatrix}"),
    ("x^2+2x+1", "(x+1)^2"), ("x^2+2x+1", "1+2x+x^2"), (r"\frac{x+1}{x-1}", r"\frac{-x-1}{1-x}"),
    ("2x+3t", "3t+2x"), ("(x+1)(x+2)", "x^2+3x+2"), ("3:4", "3 : 4"), ("3:4", "6:8"),
    ("3:4", r"\frac{3}{4}"), ("1:2:3", "2:4:6"), ("Evelyn", "evelyn"),
    (r"\text{Evelyn}", "Evelyn"), (r"\text{(C)}", "C"), ("C", r"\textbf{(C)}"),
    ("no solution", r"\text{No solution.}"), ("June 20", r"\text{June 20}"), ("yes", "Yes"),
    ("B", "B"), (r"50\%", "50"), ("50%", "50 percent"), (r"50\%", "0.5"), ("0.25", r"25\%"),
    ("5 apples", "5"), ("5", "5 apples"), (r"5\text{ cm}", "5 centimeters"),
    (r"12\text{ cm}^2", "12"), (r"90^\circ", "90"), ("90", "90 degrees"),
    (r"2\sqrt3\text{ cm}", r"2\sqrt{3}"), (r"\$32,348", "32348"), ("15 mph", "15"),
    (r"3\frac{1}{2}", r"\frac{7}{2}"), ("3 1/2", "3.5"), (r"-3\frac12", "-3.5"), ("1,234", "1234"),
    ("1{,}234", "1,234"), (r"10,\!080", "10080"), ("1,234,567", "1234567"), ("3+4i", "4i+3"),
    ("2i", "(1+i)^2"), ("-1", "i^2"), (r"e^{i\pi}", "-1"), (r"\infty", "infinity"),
    (r"-\infty", r"-\infty"), ("∞", r"\infty"), ("x=5", "5"), ("5", "x=5"), ("x=5", "x = 5"),
    ("y=2x+3", "2x+3"), ("2x+3", "y = 2x+3"), (r"x=\frac{1}{2}", "0.5"), ("f(x)=x^2", "x^2"),
    ("(x,y)=(1,2)", "(1,2)"), ("5", "2+3=5"), ("x^2+y^2=4", "y^2+x^2=4"), ("2x+3y=6", "4x+6y=12"),
    ("y=2x-1", "2x-1=y"), (r"\frac12", "0.5"), ("0.5", r"\frac{1}{2}"), (".5", "1/2"),
    ("42", "42.0"), ("2^{10}", "1024"), (r"\frac{1}{3}", "0.333333"), ("1e5", "100000"),
    (r"3\times10^8", "300000000"), (r"0.\overline{3}", "1/3"), (r"\emptyset", r"\varnothing"),
    (r"\{\}", r"\emptyset"), (r"\log_2 8", "3"), ("n!", "n!"), (r"\binom52", "10"),
    ("100,200,300", "100, 200, 300"), ("1011_2", "1011_2"),
    (r"10\sqrt{3} \text{ units}", r"10\sqrt3"), ("3:45 PM", "3:45 p.m."),
    (r"\frac{3}{4} \text{ cups}", "3/4 cup"), (r"\mathbb{R}", r"(-\infty,\infty)"),
    ("$5 million", "5000000"), (r"4+\sqrt{2}i", r"4+i\sqrt{2}"), (r"x \neq 3", r"x \ne 3"),
    (r"(2, \infty)", "x > 2"), (r"(3,\frac{\pi}{2})", r"(3, \pi/2)"),
    ("((1,2),(3,4))", "((1,2),(3,4))"), (r"\$18.90", "18.9"), (r"\sin^2 x", r"1-\cos^2 x"),
    ("a=1,b=2", "a=1, b=2"), ("5", "$5$"), ("5", r"\(5\)"), ("-2,1", "1, -2"),
    ("2:3", r"2\colon 3"), ("k = 3", "3"), (r"\text{Area} = 5", "5"),
    (r"x = 1 \text{ or } x = -1", r"\pm 1"), (r"\pm 3", "3, -3"), (r"\{x \mid x > 2\}", "x>2"),
    ("x>2", r"\{x|x>2\}"), ("10 000", "10,000"), (r"10\,000", "10000"),
    ("12 m/s", "12 meters per second"), ("60 mph", "60 miles per hour"), ("12 m/s", "12"),
    (r"\$3", "3 dollars"), ("$3", "3"), ("red, blue", "blue and red"), ("5", "5 miles per hour"),
    ("2 hours 30 minutes", "2 hours and 30 minutes"), ("(1,2)", "x=1, y=2"), ("1.5", r"1\frac12"),
    (r"\pi r^2 h", r"\pi h r^2"), ("(x+1) h", "h(x+1)"), (r"\text{-3 feet}", "-3"),
    ("2516_8", "2516_8"), ("2516_8", "2516_{8}"), ("A3_{16}", "A3_{16}"),
    ("1101_2", r"1101_{\text{two}}"), (r"\pm 1, \pm 2", "-2,-1,1,2"),
    (r"(\pm 1,2)", "(1,2),(-1,2)"), ("y=x", "x=y"), (r"\text{C, D}", "C, D"),
    (r"\text{C, D}", "D, C"), (r"\text{(A), (C)}", "A, C"), (r"\textbf{(D)}\ 12", "D"),
    (r"17\%", r"\text{17\%}"), (r"\sin 30^\circ", r"\frac12"),
    (r"\text{all real numbers}", r"\mathbb{R}"), (r"2 \frac{1}{3}\pi", r"\frac73\pi"),
    (r"x \equiv 3 \pmod 7", r"x \equiv 3 \pmod{7}"), (r"\mathbb Z", r"\mathbb{Z}"),
    (r"1,2,\ldots", r"1,2,\dots"), ("y=1, x=2", "(2,1)"), ("(2,3)", "x=2, y=3"),
    ("(2,3)", "y=3, x=2"), ("10^{-7}", "0.0000001"), (r"6.63\times10^{-34}", "6.63e-34"),
    (r"12\text{ meters per second}", r"12\text{ m/s}"), (r"5\text{ dozen}", "60"),
    (r"7\text{ liters}", "7 L"), ("5 cups", "5 cup"), (r"\$5", "5 dollars"),
    (r"50\text{ cents}", "50"), (r"9.8\text{ m/s}^2", "9.8 meters per second squared"),
    (r"2.5 \text{ times as long}", "2.5 times as long"),
    (r"x+1 \text{ if even}", r"x + 1 \text{ if even}"), ("11 a.m.", "11 AM"),
    (r"\text{minimum is } -3", "minimum is -3."), (r"20\text{ degrees}", r"20^\circ"),
    (r"\frac{1}{30000}", "0.0000333333"), (r"\frac{\pi}{1000}", "0.00314159"),
    (r"\textbf{(B)}\ \frac{3}{4}", "0.75"), (r"25\text{ N}", "25 newtons"),
    (r"10\sqrt{3} units", r"10\sqrt3"), ("1/3", "33.3333%"), (r"x=\pm 2", "-2, 2"),
    ("(x,y)=(1,2)", "y=2, x=1"), (r"\{\pm 1, 3\}", "3,1,-1"), ("3 boxes", "3 box"),
    (r"\cos 60^{\circ}", "0.5"), ("y=2x", "x=y/2"), ("A, C", "C and A"), ("5 gallons", "5 gal"),
    ("2.50 dollars", r"\$2.5"), (r"\text{don't know}", "don’t know"), ("x-axis", r"x\text{-axis}"),
    (r"\text{No solution!}", "no solution"),
    (r"\pi(R^2-r^2)", r"\pi R^2-\pi r^2"), (r"\frac{2n}{2N}", r"\frac{n}{N}"),
    ("ma=F", "F=am"), ("-1101_2", "-1101_2"), ("all reals", r"\mathbb R"),
    (r"100\pi", "314.159265"),
    (r"\text{Alice and Bob}", "Bob, Alice"), ("cat or dog", r"\text{dog, cat}"),
    ("3 dozen eggs", "36"), (r"\$5 per hour", "5 dollars per hour"), (r"\tan 45^\circ", "1"),
    (r"(\pm 3, \mp 2)", "(3,-2),(-3,2)"), (r"\text{length}=4, \text{width}=3", "4, 3"),
    (r"\textbf{(E) } 7", "7"), ("s=t^2", "t^2=s"), (r"1\frac12 x", r"\frac{3x}{2}"),
    # money in either unit
    ("5¢", "$0.05"), (r"\$0.05", "5 cents"), ("5¢", "5"), (r"\$1.25", r"125\text{ cents}"),
    (r"5\text{¢}", "5 cents"), (r"\$0.10 per egg", "10 cents per egg"), (r"12\cent", "¢12"),
    # short words, whatever their case
    ("N/A", "n/a"), ("No", "NO"), ("OK", "ok."), (r"\text{n/a}", "N/A"), ("up", "Up"),
    ("n/a", r"\frac{n}{a}"),
    # times of day
    ("6:15", "06:15"), ("3:45 PM", "15:45"), ("3:45 PM", "3:45"), ("3:45", "3:45 PM"),
    ("11:00 a.m.", "11 a.m."), ("7:30 AM", r"7{:}30 \text{ a.m.}"), ("t=6:15", "6:15"),
    ("12:30 a.m.", "0:30"), ("18:15:30", "6:15:30 p.m."), ("5:12", "5/12"), ("2:5", "6:15"),
    # decimals of enough digits, rounded or cut off
    ("2/3", "0.6666667"), ("2/3", "0.6666666"), (r"\pi", "3.141592"), (r"\pi", "3.141593"),
    (r"\sqrt2", "1.4142135"), ("1.4142135", r"\sqrt2"), ("-2/3", "-0.6666666"),
    # what was asked for as a sum or product, and steps before the answer
    ("3+4", "7"), ("3+4", "4+3"), (r"6\cdot7", "42"), ("42", r"6\cdot 7=42"), ("24", r"2^3\cdot3"),
    (r"3\times10^5", r"3\cdot 10^5"), (r"2+\sqrt3", r"\sqrt3+2"), ("1-i", "-i+1"),
    # siblings of these
    (r"-4i\sqrt{2}", r"-4\sqrt{2}i"), ("(3,1),(2,1)", "(2,1), (3,1)"), ("7:05 p.m.", "19:05"),
    ("4:6", "2:3"), ("2:3:4", "4:6:8"), (r"101_{\text{three}}", "101_3"),
    (r"101_{\text{base 3}}", "101_3"), ("(1-i)^3", "-2-2i"), (r"\frac{1}{1+i}", r"\frac{1-i}{2}"),
    ("-3x<6", "x>-2"), (r"0.1\overline{6}", "1/6"), (r"0.\overline{12}", r"\frac{4}{33}"),
    (r"\cos 45^\circ", r"\frac{\sqrt2}{2}"), ("3 sq ft", "3 square feet"),
    (r"12\text{ in}^2", "12 square inches"), ("€5", "5 euros"), ("55 cents", r"\$0.55"),
    ("e", "2.7182818"), ("e", "2.718282"), (r"\sqrt{3}", "1.7320508"), ("5 cherries", "5 cherry"),
    ("3 km/h", "3 kilometers per hour"), (r"20^\circ\text{C}", "20 degrees Celsius"),
    ("12:00 p.m.", "12:00"), ("9 AM", "9:00 am"), ("x=1", "1"), ("t=3:45 PM", "3:45 p.m."),
    (r"\frac{R}{r}", r"\frac{2R}{2r}"), ("S_n = n^2", "n^2"), (r"\angle ABC = 30^\circ", "30"),
    ("30", r"\angle ABC = 30^\circ"), ("AB = 5", "5"), ("5", "AB = 5"), ("5", "AB=3+2=5"),
    ("12", "P(3) = 12"), ("[2,3]", r"2\le x\le 3"), (r"(-1,0)\cup(2,5]", r"(2,5]\cup(-1,0)"),
    ("3-2i", "-2i+3"), (r"\{1,3\}, \{2\}", r"\{2\},\{3,1\}"), ("x=2, y=-1, z=3", "(2,-1,3)"),
    ("x_1=2, x_2=3", "(2,3)"), ("0.5 or 2", r"\frac12, 2"),
    (r"\frac{\pi}{3}+2k\pi", r"2\pi k + \frac{\pi}{3}"),
    ("2^{100}", "1267650600228229401496703205376"), (r"\ln e^2", "2"), ("|x|<3", "-3<x<3"),
    ("a^2-b^2", "(a-b)(a+b)"), ("15 minutes", "15 min"), ("1.5 hours", "1.5 hr"),
    ("3 dozen", "36"), ("No solutions", "no solutions"), (r"\text{odd}", "odd"), ("DNE", "dne"),
    ("8!", "40320"), ("-i", "-i"), ("6 square units", "6"), (r"6\text{ units}^2", "6"),
    ("5 m/s^2", "5 meters per second squared"), ("17 and 18", "17, 18"),
    ("A, B, C", r"\text{C, A, B}"), ("5:00", "5:00 PM"), ("5:00", "5 PM"),
    (r"(2,\pi)", r"(2,\pi)"), ("y=3x+1", "3x-y+1=0"), ("x^2-1=0", "1-x^2=0"), ("f(x)=2x", "2x"),
    ("25 sec", "25 seconds"), (r"\binom{6}{3}", "20"), ("x>3", r"(3, \infty)"),
    ("Tuesday", r"\text{Tuesday}"), ("1,000,000", "10^6"), ("12.50", r"\$12.50"),
    (r"12\frac{1}{2}\%", "12.5%"), ("-0.5", r"-\frac{1}{2}"), (r"3+\sqrt{5}i", r"3+i\sqrt5"),
    (r"\begin{pmatrix} i \\ 1\end{pmatrix}", r"\begin{pmatrix} i \\ 1\end{pmatrix}"),
    (r"2\pi+1", r"1+2\pi"), ("10^{-3}", "0.001"), ("1/3", "0.3333333"), ("22/7", "3.1428571"),
    ("22/7", "3.142857"), ("x < -1 or x > 1", "x>1 or x<-1"),
    ("all real numbers except 0", "all real numbers except 0"),
    (r"(-\infty, 0) \cup (0, \infty)", r"x \ne 0"),
    ("(D) 12", "12"), ("12", "D. 12"), ("12", "D: 12"), ("D", "(D) 12"),
    (r"(A) \frac{1}{2}", "0.5"),
    ("01/02/2020", "1/2/2020"), (r"2+3\mathrm{i}", "2+3i"), (r"\mathrm{e}^2", "e^2"),
    ("12.50", "USD 12.50"), (r"\pounds 5", "£5"), (r"\lg 100", "2"), ("5", "5 \\\\"),
    (r"x \equiv 3 \pmod 7", r"x \equiv 3 \mod 7"), ("2^{2019}-1", r"2\cdot 2^{2018}-1"),
    (r"\sqrt{3+2\sqrt2}", r"1+\sqrt2"), ("3A", "(A) 3"), (r"A\sqrt{2}", r"(A) \sqrt{2}"),
    ("Kx^2", "(K) x^2"), ("12", "12 USD."), (r"x \equiv 3 \pmod{12}", r"x \equiv 3 (\mod 12)"),
    (r"3 \mod 12", r"3 \mod{12}"), ("1/2/3", "1/6"), ("12/4/3", "1"), ("10-3-2", "5"),
    (r"\text{12/25/2020}", "12/25/2020"), ("e^{200}", r"e^{100}e^{100}"),
]  # fmt: skip

WRONG = [
    ("(D) 12", "(C)"), ("12", "D. 13"), ("C", "D: 12"), ("(A) and (B)", "(A)"),
    ("12/25/2020", "12-25-2020"), ("2020-12-25", "1983"), ("12/25/2020", "12/25"),
    ("2^{2019}-1", "2^{2019}"), (r"1-\frac{1}{2^{2019}}", "1"), (r"3^{1000}+\sqrt2", "3^{1000}"),
    ("A: 3, B: 4", "A"), ("A", "A: 3, B: 4"), ("A", "(A) 3 (B) 4"), ("B", "(B) 3 or (C) 4"),
    ("I", "I. 5, II. 6"), ("A", r"(A) \subset B"), ("A", "(A) ^2"), ("0", r"10^{-2500}\pi"),
    ("100!", "100!+1"), ("10^{10^9}", "10^{10^9}+1"), ("1,2,3", "1,2"), (r"1+\mathrm{i}", "1-i"),
    (r"2\sqrt{2}", "2"), (r"2\sqrt{2}", r"\sqrt2"), (r"\frac{\pi}{4}", "1/4"),
    (r"\frac{\pi}{4}", "4"), ("2pi", "6.28"), (r"\pi", "3.14"), ("(1,2)", "(2,1)"),
    ("(1,2)", "2,1"), ("(1,2)", "[1,2]"), ("(1,2)", "(1,2]"), ("(1,2)", "1"), ("(1,2)", "2"),
    ("(1,2)", r"\{1,2\}"), (r"\{1,2\}", "(1,2)"), ("(1,2)", "(1,2,3)"), (r"x \geq 5", "5"),
    (r"x \geq 5", "x>5"), (r"x \geq 5", r"x \le 5"), ("5", r"x \geq 5"), (r"x\geq5", "x=5"),
    (r"[5,\infty)", r"(5,\infty)"), (r"[5,\infty)", "5"), ("1<x<3", "[1,3]"), ("1<x<3", "x<3"),
    ("x>5", "y=5"), ("3, 5, 7", "7"), ("3, 5, 7", "3, 5"), ("3, 5, 7", "3,5,7,9"),
    ("7", "3, 5, 7"), ("3,5,7", "357"), ("2 or 3", "2"), ("2", "2 or 3"), ("x=1, y=2", "2, 1"),
    (r"1\pm\sqrt2", r"1+\sqrt{2}"), ("x=1,y=2", "x=2,y=1"), (r"\{1,2\}", r"\{1\}"),
    (r"\{1,2\}", "2"), (r"\{1,2\}", "[1,2]"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", "4"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"),
    ("x^2+2x+1", "x^2+2x"), ("x^2+2x+1", "1"), ("2x+3t", "2x+3"), ("x^2+1", "x^2"), ("x+1", "y+1"),
    ("3:4", "4:3"), ("3:4", "3"), ("3:4", "4"), ("1:2:3", "1:2"), ("1:2:3", "1:2:4"), ("3", "3:4"),
    ("Evelyn", "Alice"), ("Evelyn", "E"), (r"\text{(C)}", "B"), ("no solution", "0"),
    ("yes", "no"), ("0", "no solution"), ("June 20", "20"), ("20", "June 20"), (r"50\%", "5"),
    (r"50\%", "0.05"), ("5 apples", "6 apples"), ("5 cm", "5 m"), ("5 apples", "apples"),
    (r"90^\circ", "45"), (r"3\frac{1}{2}", "3"), (r"3\frac{1}{2}", r"\frac32"), ("3 1/2", "1/2"),
    ("1,234", "1.234"), ("1,234", "234"), ("1,234", "1"), ("3+4i", "3-4i"), ("3+4i", "3"),
    ("3+4i", "7"), ("i", "1"), ("2i", "2"), (r"\infty", r"-\infty"), (r"\infty", "0"),
    ("x=5", "x=6"), ("x=5", "y=5"), ("x=5", "-5"), ("y=2x+3", "2x"), ("5", "x+1=5"),
    ("2x+z=1", "1"), ("(x,y)=(1,2)", "(2,1)"), ("x^2+y^2=4", "4"), ("x^2+y^2=4", "x^2+y^2=2"),
    ("f(x)=x^2", "x"), (r"\frac12", "2"), (r"\frac12", "1"), (r"\frac{1}{3}", "0.33"),
    ("0.0000001", "0.0000002"), ("1000000", "1000001"), ("42", "24"), ("12", "1 2"), ("12", "1,2"),
    ("2^{10}", "20"), ("1011_2", "1010_2"), ("10", "9**9"), (r"\frac{1}{", r"\frac{1}{"),
    ("((((", "(((("), ("", ""), (r"\sqrt{", r"\sqrt{"), ("3", ""), ("3:45 PM", "3:45 AM"),
    ("(0,1)", "0"), (r"\emptyset", "0"), (r"2\pi r", r"2\pi"), (r"\{x : x > 2\}", "x<2"),
    ("5", "x=6=5"),
    (r"\text{-3 feet}", r"\text{3 feet}"),
    (r"2.5 \text{ times as long}", r"25 \text{ times as long}"), (r"x+1 \text{ if even}", "x-1"),
    (r"x+1 \text{ if even}", r"x-1 \text{ if even}"), ("1.1 a.m.", "11 a.m."), ("1101_2", "1101_3"),
    ("1101_2", "1101_{10}"), ("1101_2", "1101"), ("1101_2", "13"), ("2516_8", "2516_7"),
    ("A3_{16}", "A3_{12}"), ("1101", "1101_2"), ("10^{-7}", "0.000000"),
    (r"6.63\times10^{-34}", "0.000000"), ("0.000001", "0.0000014"), ("0", "0.0000001"),
    ("10^{-7}", "0"), ("(-1,2)", "-1, 2"), ("-1, 2", "(-1,2)"), ("(2,3)", "y=2, x=3"),
    ("y=1, x=2", "(1,2)"), (r"3\text{ m/s}", r"3\text{ km/s}"), (r"5\text{ N}", r"5\text{ kN}"),
    (r"\$50", r"50\text{ cents}"), (r"7\text{ liters}", r"7\text{ gallons}"),
    (r"12\text{ meters}", r"12\text{ meters per second}"), (r"5\text{ dozen}", "5"),
    ("25", "25 squared"), ("5", "5 factorial"), (r"20\text{ degrees}", r"20\%"), ("5", "5 halves"),
    ("5 mW", "5 MW"), (r"2\sqrt3\text{ cm}", r"2\sqrt3\text{ m}"), (r"\textbf{(D)}\ 12", "E"),
    (r"\textbf{(D)}\ 12", r"\textbf{(D)}\ 13"), (r"\textbf{(D)}\ 12", "13"),
    (r"\text{(A), (C)}", "A"), (r"\text{C, D}", "C"), (r"\sin 30^\circ", r"\sin 30"),
    (r"(\pm 1,2)", "(1,2)"), (r"\mathbb Z", r"\mathbb{R}"),
    (r"x \equiv 3 \pmod 7", r"x \equiv 3 \pmod{5}"), ("y=x", "y=-x"), ("€5", r"\$5"),
    (r"\text{3 or fewer}", "3"), (r"\text{3+2 apples}", r"\text{3-2 apples}"),
    ("12345.67", "12345.7"), ("123456", "123456.4"), (r"10^{-8}\pi", "0"), ("2^{100}", "2^{100}+1"),
    (r"2 \frac{1}{3}\pi", r"\frac23\pi"), ("FF_{16}", "FF"), ("777_8", "777_9"),
    ("x=1, y=2", "[1,2]"), (r"f(x)=x^2 \text{ for } x>0", r"f(x)=x^2 \text{ for } x<0"),
    ("1, 2", "[1,2]"), ("5 cubed", "5"), ("k t", "k"), ("x^2 l", "x^2"),
    (r"\frac{a}{b} s", r"\frac{a}{b}"), ("(1,2)", "1, 2"), ("x=1+1=2", "x=3=3"),
    (r"\pi(R^2-r^2)", "0"), (r"\frac{n}{N}", "1"), ("2X", "2x"), ("y'", "y"), ("-1101_2", "1101_2"),
    (r"\frac{1}{2} g", r"\frac12"), ("(1101_2, 3)", "(1101_3, 3)"), ("e^{-20}", "0.000000"),
    ("b=1, a=3", "(1,3)"), (r"8^\circ F", r"8^\circ C"), ("£3", "$3"), ("6 trillion", "6 billion"),
    (r"\text{x > 3}", r"\text{x < 3}"), (r"\text{at least } 3.5", r"\text{at least } 35"),
    (r"\begin{pmatrix}10^{-8}\end{pmatrix}", r"\begin{pmatrix}0\end{pmatrix}"), ("R=r+1", "r=R+1"),
    ("5¢", "$5"), ("5¢", "$0.50"), (r"\$0.05", "0.05 cents"), ("€0.05", "5¢"),
    (r"\$0.10 per egg", "10 cents per dozen"), ("AB", "ab"), ("A/B", "a/b"), ("no", "on"),
    ("6:15", "12:30"), ("6:15", "2:5"), ("6:15", "2/5"), ("5:12", "10:24"), ("3:45 PM", "3:45 AM"),
    ("3:45 PM", "3:46"), ("15:45", "3:45"), ("12:30 a.m.", "12:30 p.m."), ("3:45 AM", "15:45"),
    ("6:15", "6.25"), ("6:15", "615"), ("11 a.m.", "11"), ("2:30:00", "5:00:00"), ("1:15", "2:30"),
    ("2/3", "0.666666"), ("2/3", "0.67"), ("2/3", "0.6666665"), (r"\pi", "3.1415"),
    (r"\pi", "3.1415928"), (r"\sqrt2", "1.4142"), ("n/a", "no"), ("0.666666", "2/3"),
    ("3.14", r"\pi"), ("0.33", "1/3"),
    ("5", "2+3"), ("42", r"6\cdot7"), ("42", r"6 \times 7"), ("7/2", r"3+\frac12"), ("5", "10-5"),
    ("110", "30+30+50"), (r"\frac12", r"\frac{2+1}{6}"), ("(1,5)", "(1,2+3)"), ("5", "(2+3)"),
    ("x=5", "2+3"), ("5", "x=2+3"), ("5", "5=2+3"), ("3, 5", "3, 2+3"), ("6", "2(3)"),
    ("6", "(2)(3)"), (r"5\text{ cm}", r"2+3\text{ cm}"), ("0.5", "1-0.5"), ("50%", "25% + 25%"),
    ("(3,1),(2,1)", "(5,1),(7,2)"), ("(3,1),(2,1)", "(3,1)"), ("7", "x-1=7"), ("e^{-40}", "0"),
    ("e^{-40}", "0.0"), (r"\pi", "3.141594"), ("4:6", "6:4"), ("7:05 p.m.", "7:05 a.m."),
    ("2:3:4", "4:3:2"), ("3:4", "0:0"), ("3:2:4", "3:2:0"),
    ("(1-i)^3", "2-2i"), ("-3x<6", "x<-2"), (r"0.1\overline{6}", "0.16"),
    ("3 square feet", "3 cubic feet"), ("3 square feet", "3 feet"), ("55 cents", "$55"),
    ("x=1, y=2, z=3", "(3,2,1)"), ("5", "AB=3+2=6"), ("5", "x=5=6"), ("5", "3x=5+1"),
    ("2^{100}", "1267650600228229401496703205377"), ("12:00 a.m.", "12:00 p.m."), ("9 AM", "9"),
    ("R-r", "0"), ("Rr", "r^2"), ("aA", "a^2"), ("10^{-20}", "10^{-21}"),
    ("10^{-8}", r"2\cdot 10^{-8}"), ("e^{-20}", "e^{-21}"), (r"\sqrt{2}", "1.414214214"),
    ("(1,2)", "(1,2),(3,4)"), (r"\{1,2\}", "1"), ("x>3", "x>=3"), ("[2,3]", "2<x<3"),
    ("3", "3, 4"), ("2abc", "2"), ("3xy", "3"), ("1+i", "1-i"), ("i", "-i"), ("5 kg", "5 g"),
    ("5 inches", "5 feet"), ("101_3", r"101_{\text{two}}"), ("y=3x+1", "3x-y-1=0"),
    ("6:30", "6.5"), ("1,2,3", "(1,2,3)"), ("12", "12_5"), ("yes", "yes or no"), ("3", "1+2"),
    (r"\frac{1}{2}", r"\frac{1}{3}"), ("3:2", "1.6"), ("0.1", "0.10000001"), ("10!", "3628801"),
    ("1000000", "999999"), (r"\sqrt{2}+10^{-9}", r"\sqrt{2}"), ("100", "99.99999"),
    ("0", "e^{-30}"), ("x=1", "x=1,y=2"), ("x=1,y=2", "x=1"), ("2", "x=2, y=3"), (r"\infty", "5"),
]  # fmt: skip


def completion(answer: str) -> str:
    return (
        f"#### Step 1\nWe compute \\boxed{{7}} first.\n\nSo it is $\\boxed{{{answer}}}$, as wanted."
    )


@pytest.mark.parametrize(("gold", "answer"), RIGHT)
def test_a_right_answer_scores_one(gold, answer):
    assert MATH_VERIFY(completion(answer), gold) == 1.0


@pytest.mark.parametrize(("gold", "answer"), WRONG)
def test_a_wrong_answer_scores_nothing(gold, answer):
    assert MATH_VERIFY(completion(answer), gold) == 0.0


@pytest.mark.parametrize("gold", [gold for gold, _ in RIGHT])
def test_every_gold_answer_is_won_by_itself_bare_or_wrapped(gold):
    assert same_answer(gold, gold)
    for written in (gold, f"${gold}$", f"\\({gold}\\)"):
        assert MATH_VERIFY(completion(gold), written) == 1.0


@pytest.mark.parametrize(
    "gold", [r"\frac{1}{", "((((", "", r"\sqrt{", "x = = 5", "x + + )", "(1, 2"]
)
def test_what_does_not_parse_is_no_gold_answer(gold):
    assert not same_answer(gold, gold)
    assert MATH_VERIFY(completion("5"), gold) == 0.0


@pytest.mark.parametrize(
    ("gold", "answer", "score"),
    [
        ("5 apples", "5", 1), ("5 apples", "5 apples", 1), ("12 eggs", "12.0", 1),
        ("5 apples", "6 apples", 0), ("5 cm", "5 m", 0), ("5 cm", "5 centimeters", 1),
        ("1/2", "0.5", 1), ("1/2", r"\frac{1}{2}", 1), ("1/2", "1", 0), ("1/2", "2", 0),
        ("3 1/2", "3.5", 1), ("3 1/2", r"3\frac{1}{2}", 1), ("3 1/2", "3", 0),
        (r"\frac{3}{4}", "0.75", 1), ("-2/3", "2/-3", 0), ("-2/3", r"-\frac{2}{3}", 1),
        ("$1,250", "1250 dollars", 1), ("40%", "40", 1), ("2.5 million", "2500000", 1),
        ("7", "x = 7", 1), ("7", "x + 1 = 7", 0), ("1e3", "1000", 1), ("1 2", "12", 0),
    ],
)  # fmt: skip
def test_number_reads_units_fractions_and_mixed_numbers(gold, answer, score):
    for text in (f"\\boxed{{{answer}}}", f"so\n#### {answer}", f"The answer is {answer}."):
        assert NUMBER(text, gold) == score
        assert NUMBER(text, f"some work\n#### {gold}") == score

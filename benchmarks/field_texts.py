"""Texts of `benchmarks.field`, written for it, or cut from published sequences.

Nothing was chosen on them.
"""

PROSE = """
The old sailor mended his nets while the tide crept up the empty beach.
Snow covered the roofs, and the whole town was quiet until the bells rang.
Her grandfather kept bees behind the barn and never wore gloves.
When the lights went out, everybody in the theatre began to whisper.
The doctor who treated the mayor refused to speak with the newspapers.
A red kite hung in the tree for weeks after the boy had moved away.
The clerk stamped every form twice because the first stamp was too pale.
They sold the farm to a cousin who had never milked a cow.
Rain had washed away the path, so the hikers followed the stream instead.
The painter mixed blue with a little white and started on the sky.
Nobody knew why the clock in the station always ran four minutes late.
My neighbour feeds two foxes that come to her garden at dusk.
The treaty was signed in a railway carriage in the middle of a forest.
Before the harvest the brothers sharpened their scythes on a wet stone.
The library lends umbrellas to readers who are surprised by rain.
After the last customer left, the baker swept flour from the floor.
"""
CODE = """
def area(width, height): return width * height
for name in names: print(f"hello {name}")
if (count > limit) { throw new Error("too many"); }
let total = prices.reduce((a, b) => a + b, 0);
SELECT COUNT(*) FROM orders WHERE status = 'open';
while not queue.empty(): item = queue.get()
class Point: def __init__(self, x, y): self.x = x
with open("log.txt") as file: lines = file.readlines()
public int size() { return items.length; }
result = [row[0] for row in table if row[1] is None]
import numpy as np; x = np.zeros((3, 4))
except KeyError as error: logger.warning(error)
git commit -m "fix typo" && git push origin main
<div class="menu"><a href="/home">Home</a></div>
INSERT INTO users (name, age) VALUES ('Ann', 41);
const index = words.indexOf(word); if (index < 0) return;
"""
QUESTIONS = """
Question: What is the largest ocean on Earth? Answer: The
Anna has five pens and loses two. Now Anna has
Who painted the Mona Lisa? The Mona Lisa was painted by
What language do people speak in Brazil? In Brazil they speak
Is a whale a fish or a mammal? A whale is a
The opposite of hot is cold. The opposite of tall is
Question: How many legs does a spider have? Answer: A spider has
What do bees make from nectar? From nectar bees make
Which month comes after June? The month after June is
If today is Monday, then the day after tomorrow is
What is the capital of Japan? The capital of Japan is
Who discovered penicillin? Penicillin was discovered by Alexander
Is gold heavier than water? Gold sinks because it is
Which animal is the tallest? The tallest animal is the
Water freezes at zero degrees, and it boils at one
What is three plus four? Three plus four is
"""
REPEATS = """
apple chair moon paper apple chair moon paper apple chair
red red blue red red blue red red blue red red
1 4 9 2 1 4 9 2 1 4 9 2
up down up down left up down up down left up
Tom saw Ann. Ann saw Bob. Tom saw Ann. Ann saw
K L M N K L M N K L M N
the cat sat, the dog ran, the cat sat, the dog
salt pepper oil salt pepper oil salt pepper
x = 1; y = 2; x = 1; y = 2; x =
one two one two three one two one two three one two
cold wind cold rain cold wind cold rain cold wind
Paris France Rome Italy Paris France Rome Italy Paris
ping pong ping pong ping pong ping pong
big small big small big big small big small big
a b c a b c d a b c a b c d a
tea milk sugar tea milk sugar tea milk
"""
SENTENCES = """
The ferry was cancelled because of strong winds.
A new bakery opened next to the town hall.
Doctors advise drinking more water in summer.
The football match ended without a single goal.
My laptop needs an hour to start in the morning.
Wolves have returned to the forests of the north.
The price of coffee has doubled within two years.
He plays the trumpet in a small jazz band.
Students protested against the new exam rules.
This medicine should be taken before meals.
The bridge was closed for repairs until May.
Grandmother knitted a scarf for each of the children.
An earthquake shook the island early on Sunday.
The company hired twenty engineers from abroad.
Penguins take turns to keep their eggs warm.
Her first novel was translated into nine languages.
The judge postponed the trial by three weeks.
A thief stole the necklace during the party.
Solar panels now cover the roof of the school.
The cook burned the onions and started again.
Pilots must rest for ten hours between flights.
The village celebrates its cherries every June.
An old map showed a tunnel under the castle.
Children learn languages faster than adults do.
The bank lowered its interest rate once more.
A storm damaged the greenhouse in the park.
The actor forgot his lines in the second act.
Our train stopped for an hour in a tunnel.
Ants carry leaves that are heavier than themselves.
The plumber found a ring in the old pipe.
Tourists photographed the eclipse from the beach.
The army withdrew its soldiers from the border.
"""
REACTIONS = """
CC(=O)Cl.OCC1CC1>>CC(=O)OCC1CC1
ClCc1ccccc1.CNC>>CN(C)Cc1ccccc1
O=C(O)C1CC1.NC1CCC1>>O=C(NC1CCC1)C1CC1
CCN.O=C=Nc1ccccc1>>CCNC(=O)Nc1ccccc1
BrCCC.Oc1ccccc1>>CCCOc1ccccc1
CS(=O)(=O)Cl.Nc1ccccc1>>CS(=O)(=O)Nc1ccccc1
O=CC1CCCC1.NCC>>CCNCC1CCCC1
Clc1ncccn1.C1CNCCN1>>c1cnc(N2CCNCC2)nc1
COC(=O)c1ccccc1.O>>O=C(O)c1ccccc1
OB(O)c1ccsc1.Brc1ccccc1>>c1ccc(-c2ccsc2)cc1
CC(=O)c1ccccc1.[BH4-]>>CC(O)c1ccccc1
CC(C)(C)OC(=O)NCC.Cl>>NCC
N#Cc1ccccc1.[H][H]>>NCc1ccccc1
OCCO.CC(=O)C>>CC1(C)OCCO1
C=CC=C.C=CC=O>>O=CC1CC=CCC1
O=[N+]([O-])c1ccc(F)cc1.NC>>CNc1ccc([N+](=O)[O-])cc1
CI.Oc1ccncc1>>COc1ccncc1
OC1CCCCC1.CC(=O)O>>CC(=O)OC1CCCCC1
NN.O=CC>>CC=NN
ClC(=O)OCC.NC1CC1>>CCOC(=O)NC1CC1
FC(F)(F)C(=O)O.NCCO>>O=C(NCCO)C(F)(F)F
CCOC(=O)C=C.NCC>>CCNCCC(=O)OCC
BrCC(=O)OC.SC>>COC(=O)CSC
Ic1ccccc1.C#CCO>>OCC#Cc1ccccc1
C1CO1.NC1CCCCC1>>OCCNC1CCCCC1
O=C1CCCO1.NC>>CNC(=O)CCCO
CC=O.CC=O>>CC=CC=O
OCc1ccccc1.O=S(Cl)Cl>>ClCc1ccccc1
CC(=O)OCC.[OH-]>>CC(=O)O
O=Cc1ccco1.CN>>CNCc1ccco1
CCBr.[N-]=[N+]=[N-]>>CCN=[N+]=[N-]
Nc1ccc(Br)cc1.CC(=O)Cl>>CC(=O)Nc1ccc(Br)cc1
"""
# variable domains of antibodies; each is cut into four pieces
CHAINS = """
EVQLVESGGGLVQPGGSLRLSCAASGFNIKDTYIHWVRQAPGKGLEWVARIYPTNGYTRYADSVKGRFTISADTSKNTAYLQMNSLRAEDTAVYYCSRWGGDGFYAMDY
DIQMTQSPSSLSASVGDRVTITCRASQDVNTAVAWYQQKPGKAPKLLIYSASFLYSGVPSRFSGSRSGTDFTLTISSLQPEDFATYYCQQHYTTPPTFGQGTKVEIK
EVQLVESGGGLVQPGRSLRLSCAASGFTFDDYAMHWVRQAPGKGLEWVSAITWNSGHIDYADSVEGRFTISRDNAKNSLYLQMNSLRAEDTAVYYCAKVSYLSTASSLDY
DIQMTQSPSSLSASVGDRVTITCRASQGIRNYLAWYQQKPGKAPKLLIYAASTLQSGVPSRFSGSGSGTDFTLTISSLQPEDVATYYCQRYNRAPYTFGQGTKVEIK
QVQLQQPGAELVKPGASVKMSCKASGYTFTSYNMHWVKQTPGRGLEWIGAIYPGNGDTSYNQKFKGKATLTADKSSSTAYMQLSSLTSEDSAVYYCARSTYYGGDWYFNV
QIVLSQSPAILSASPGEKVTMTCRASSSVSYIHWFQQKPGSSPKPWIYATSNLASGVPVRFSGSGSGTSYSLTISRVEAEDAATYYCQQWTSNPPTFGGGTKLEIK
QVQLKQSGPGLVQPSQSLSITCTVSGFSLTNYGVHWVRQSPGKGLEWLGVIWSGGNTDYNTPFTSRLSINKDNSKSQVFFKMNSLQSNDTAIYYCARALTYYDYEFAY
DILLTQSPVILSVSPGERVSFSCRASQSIGTNIHWYQQRTNGSPRLLIKYASESISGIPSRFSGSGSGTDFTLSINSVESEDIADYYCQQNNNWPTTFGAGTKLELK
"""
STDLIB = """
def __len__(self):\\n        return len(self._items)
if self._closed:\\n            raise ValueError("closed file")
for i in range(len(data)):\\n        total += data[i]
self.name = name\\n        self.value = value
return os.path.join(root, name)
try:\\n    import ssl\\nexcept ImportError:\\n    ssl = None
def pop(self, key, default=None):\\n        return self.data.pop(key, default)
while True:\\n        line = self.readline()\\n        if not line:
raise NotImplementedError("subclasses must do this")
with self.assertRaises(TypeError):\\n            f(1, 2)
if isinstance(other, Set):\\n            return other
result = {}\\n    for k, v in pairs:\\n        result[k] = v
class Error(Exception):\\n    pass
def _check(self, size):\\n        if size < 0:\\n            return
args = parser.parse_args()\\n    main(args)
self.assertEqual(str(x), "abc")
return (self.x == other.x and self.y == other.y)
import sys\\nimport time\\nimport threading
def wrapper(*args, **kwds):\\n        return func(*args, **kwds)
elif c in "abc":\\n            state = 1
lst = sorted(lst, key=len)\\n    return lst[0]
if not hasattr(obj, "__iter__"):\\n        return False
data = sock.recv(1024)\\n        if not data:\\n            break
def test_empty(self):\\n        self.assertEqual(f(""), [])
print("usage: prog [options]", file=sys.stderr)
yield from self._walk(child)\\n        yield node
self._lock.acquire()\\n        try:\\n            self.count += 1
return "%s(%r)" % (self.name, self.args)
from collections import namedtuple\\nPair = namedtuple("Pair", "a b")
n = int(s, 16)\\n    return n & 255
assert len(a) == len(b), (a, b)
del self._cache[key]\\n        return default
"""

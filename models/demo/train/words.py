"""The lexicon of Ember's small world: who lives in it, where, with what, and what is true there.

Tables are plain text, one row a line, columns split by `|`, so that a word is added by adding a row.
"""


def _rows(text):
    return [tuple(cell.strip() for cell in line.split("|")) for line in text.strip().splitlines()]


def _words(text):
    return text.split()


BOYS = _words(
    "Tom Ben Sam Max Leo Finn Hugo Oscar Jack Kasper Theo Noah Adam Paul Karl Emil Otto Felix Milo Jonas "
    "Peter Martin Oliver Arthur George Henry Victor Simon Lucas Daniel David Robin Anton Rafi Omar Ivan "
    "Marco Diego Kenji Tariq"
)
GIRLS = _words(
    "Anna Mia Lily Rose Nora Emma Ella Clara Ida Lena Sofia Maya Zoe Ruth Alice Julia Marta Greta Hanna "
    "Tilda Olive Lucy Sarah Flora Daisy Iris Amy Eva Lina Vera Nina Ada Elsa Freya Carmen Leila Yuki "
    "Priya Amina Rita"
)
PET_NAMES_HE = _words(
    "Pip Bramble Rusty Bruno Dusty Nibbles Barley Biscuit Moss Pepper Thistle Button Tumble Scout Copper "
    "Jasper Monty Rolo Sprig Toby Waffle Fidget Hazelnut Oats Flint"
)
PET_NAMES_SHE = _words(
    "Willow Hazel Poppy Luna Pearl Honey Ginger Misty Clover Maple Juniper Bonnie Dot Fern Olga Pippa "
    "Saffron Tansy Velvet Wren Plum Snowdrop Mimi Dahlia Sorrel"
)

# kind | where it lives | what it eats | the sound it makes | its young | legs | size rank
ANIMALS = _rows("""
fox | in a den in the forest | berries and mice | yaps | cub | four | 5
rabbit | in a burrow under the ground | grass and carrots | squeaks | kit | four | 4
mouse | in a hole in the wall | seeds and cheese | squeaks | pup | four | 2
bear | in a cave in the mountains | honey and fish | growls | cub | four | 9
owl | in a hollow tree | mice | hoots | owlet | two | 4
hedgehog | under a heap of leaves | beetles and worms | snuffles | hoglet | four | 3
squirrel | in a nest in a tree | nuts and acorns | chatters | kit | four | 3
frog | in the pond | flies | croaks | tadpole | four | 2
duck | on the pond | bread and weeds | quacks | duckling | two | 4
goose | on the lake | grass and corn | honks | gosling | two | 5
swan | on the lake | water plants | hisses | cygnet | two | 5
hen | in the henhouse | corn | clucks | chick | two | 4
cat | in the house | fish and milk | meows | kitten | four | 4
dog | in a kennel | meat and bones | barks | puppy | four | 5
horse | in the stable | hay and oats | neighs | foal | four | 10
donkey | in the stable | hay and thistles | brays | foal | four | 8
cow | in the barn | grass | moos | calf | four | 10
sheep | in the meadow | grass | bleats | lamb | four | 6
goat | on the hillside | leaves and grass | bleats | kid | four | 6
pig | in the sty | apples and turnips | oinks | piglet | four | 6
deer | in the forest | leaves and buds | bellows | fawn | four | 8
wolf | in a den in the mountains | meat | howls | cub | four | 7
badger | in a sett under the ground | worms and roots | grunts | cub | four | 5
otter | by the river | fish | whistles | pup | four | 5
beaver | in a lodge on the river | bark and twigs | slaps its tail | kit | four | 5
turtle | in the pond | water plants | hisses | hatchling | four | 3
tortoise | in the garden | lettuce | hisses | hatchling | four | 4
snail | in its shell | leaves | makes no sound | hatchling | no | 1
bee | in a hive | nectar | buzzes | grub | six | 1
ant | in an anthill | crumbs | makes no sound | grub | six | 1
butterfly | in the meadow | nectar | makes no sound | caterpillar | six | 1
ladybird | in the garden | tiny insects | makes no sound | grub | six | 1
spider | in a web | flies | makes no sound | spiderling | eight | 1
crow | in a tall tree | seeds and worms | caws | chick | two | 4
sparrow | in a nest under the roof | seeds | chirps | chick | two | 2
robin | in a nest in the hedge | worms | sings | chick | two | 2
penguin | on the ice | fish | squawks | chick | two | 5
seal | in the cold sea | fish | barks | pup | no | 8
whale | in the deep sea | tiny shrimps | sings | calf | no | 12
fish | in the water | worms and weeds | makes no sound | fry | no | 2
crab | on the beach | seaweed | clicks | hatchling | ten | 2
camel | in the desert | dry grass | grunts | calf | four | 10
lion | on the grassy plain | meat | roars | cub | four | 9
tiger | in the jungle | meat | roars | cub | four | 9
monkey | in the jungle | bananas | chatters | baby | four | 5
parrot | in the jungle | nuts and fruit | squawks | chick | two | 3
elephant | on the grassy plain | leaves and grass | trumpets | calf | four | 11
giraffe | on the grassy plain | leaves | hums | calf | four | 11
kangaroo | on the dry plain | grass | clicks | joey | two | 8
bat | in a cave | moths | squeaks | pup | two | 2
mole | in a tunnel under the ground | worms | squeaks | pup | four | 3
""")
# Kinds that walk, talk and travel in stories; the rest are only asked about.
STORY_KINDS = _words(
    "fox rabbit mouse bear owl hedgehog squirrel frog duck goose hen cat dog horse donkey cow sheep goat pig "
    "deer wolf badger otter beaver turtle tortoise snail crow sparrow robin penguin mole lion monkey "
    "parrot elephant tiger camel kangaroo bat"
)
# Kinds that a story uses only when someone asks for one.
RARE_KINDS = _words("dragon giant wizard knight prince princess robot fairy pirate ghost unicorn troll king queen")

MANNERS = _words("small little young shy clever quiet cheerful curious gentle lively")
COATS = _words("tiny brown grey white black plump fluffy")

# trade, of people who help
TRADES = _words(
    "baker miller farmer fisherman carpenter blacksmith teacher gardener shepherd weaver potter tailor "
    "sailor painter postman clockmaker cobbler beekeeper doctor shopkeeper"
)
ELDER = _words("old wise kind patient")

# preposition | place
PLACES = _rows("""
in | the forest
in | the meadow
in | the village
in | the valley
in | the orchard
in | the garden
in | the market
in | the barn
in | the cave
in | the harbour
in | the little town
in | the old castle
in | the pine wood
in | the tall tower
in | the library
in | the school yard
at | the mill
at | the farm
at | the bakery
at | the inn
at | the ferry landing
at | the crossroads
by | the river
by | the lake
by | the pond
by | the sea
by | the well
by | the waterfall
by | the stone wall
by | the lighthouse
by | the old oak
by | the hollow tree
by | the hedge
by | the stream
on | the hill
on | the beach
on | the island
on | the cliff
on | the bridge
on | the mountain
""")

OBJECTS = _words(
    "lantern kite ball drum whistle scarf hat bell book map key shell stone feather button basket cup boat "
    "doll umbrella blanket ribbon ring coin mirror compass flute hoop puppet clock candle spoon box bag marble "
    "crown bucket spade pencil horn violin quilt locket jar teapot rope ladder sled wheel flag pillow lamp "
    "bowl broom chair"
)
OBJECT_ADJ = _words(
    "red blue green yellow white black golden silver purple orange pink brown wooden old new shiny tiny striped "
    "painted round small beautiful"
)

FOODS = _rows("""
apple pie
honey cake
warm bread
pea soup
plum jam
nut cake
pancakes
berry pie
cheese
roasted chestnuts
pumpkin soup
ginger biscuits
carrot stew
sweet pears
buttered toast
mushroom soup
""")
FOODS = [row[0] for row in FOODS]

HOBBIES = [row[0] for row in _rows("""
sing in the rain
count the stars
climb trees
collect round stones
listen to stories
chase the wind
draw pictures in the sand
dance on the tips of the toes
watch the clouds
whistle funny tunes
bake little cakes
look for feathers
tell jokes
plant seeds
splash in puddles
build tiny houses
read big books
swim in cold water
""")]

# skill | what practising it looks like | what it looks like once learned
SKILLS = _rows("""
swim | splashed and sank | glided through the water
whistle | puffed and blew | whistled a clear tune
dance | stumbled and tripped | danced without one wrong step
skate | slipped and fell | skated in a wide circle
row a boat | went round and round | rowed straight across the water
bake bread | burned every loaf | baked a perfect loaf
play the flute | made only squeaks | played a sweet song
read | mixed up all the letters | read a whole page aloud
paint | spilled the colours | painted a bright picture
juggle | dropped every ball | juggled five balls at once
""")

# fear | where it waits | how it ends
FEARS = _rows("""
the dark | it was as black as ink | the dark was only the day with its eyes closed
thunder | the sky rumbled and cracked | thunder was only a loud noise
deep water | the water was cold and deep | deep water holds you up when you are calm
high places | the ground was very far below | high places have the finest view
the old dog | the old dog growled at the gate | the old dog was only lonely
the wind | the wind howled like a wolf | the wind was only in a hurry
strangers | a tall stranger stood in the way | a stranger can be a friend you do not know yet
shadows | long shadows crept along the wall | a shadow is only a place where the light is busy
""")

# trap | tool | how the tool helps
RESCUES = _rows("""
had fallen into a deep hole | rope | let down the rope and pulled with all {a.his} might
was stuck in the thick mud | plank | laid the plank across the mud
was caught in a thorn bush | pair of scissors | cut the thorns away one by one
sat on a branch and could not get down | ladder | leaned the ladder against the trunk
was trapped under a fallen branch | strong stick | lifted the branch with the strong stick
was drifting away on a log | net | threw the net and drew the log to the shore
was locked in the cellar | spare key | turned the spare key in the lock
was lost in the thick fog | lantern | held the lantern high until its light was seen
""")

# sickness | remedy | what it is made into
REMEDIES = _rows("""
had a bad cough | honey | a spoon of warm honey
had a fever | mint leaves | a cup of mint tea
had a sore throat | sage | a cup of sage tea
could not sleep | lavender | a pillow filled with lavender
had a stomach ache | fennel | a cup of fennel tea
had a cold | elderberries | a glass of hot elderberry juice
had a headache | willow bark | a cup of willow tea
""")

# what breaks in the storm | what it is mended with
BROKEN = _rows("""
the bridge | planks and nails
the roof | straw and rope
the fence | posts and wire
the henhouse | boards and a hammer
the boat shed | planks and tar
the garden wall | stones and clay
the mill wheel | oak boards and pegs
the swing | a strong new rope
""")

# contest | what one does in it | a boast
CONTESTS = _rows("""
running race | ran | Nobody runs faster than I do
swimming race | swam | Nobody swims faster than I do
singing contest | sang | Nobody sings better than I do
baking contest | baked | Nobody bakes better than I do
kite contest | flew a kite | Nobody flies a kite higher than I do
drawing contest | drew a picture | Nobody draws better than I do
sled race | sledged | Nobody is faster on a sled than I am
dancing contest | danced | Nobody dances better than I do
""")

# a noise | who or what makes it
NOISES = _rows("""
tap, tap, tap | a woodpecker knocking on the roof
scratch, scratch, scratch | a kitten who wanted to come in
drip, drip, drip | a leaking rain barrel
creak, creak, creak | an old gate swinging in the wind
hoo, hoo, hoo | a baby owl who had fallen out of the nest
squeak, squeak, squeak | a family of mice moving house
bump, bump, bump | an apple rolling about in the attic
rustle, rustle, rustle | a hedgehog making a bed of leaves
""")

SEEDS = _words("pumpkin sunflower bean carrot apple rose tomato turnip melon poppy")

NUMBERS = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty"
)

# Macros: `<glad>` in a template is one of these.
MACROS = {
    "glad": "happy|glad|cheerful|delighted|full of joy|very happy",
    "sad": "sad|unhappy|very sad|miserable|heavy-hearted|close to tears",
    "trait": "kind|brave|curious|clever|gentle|cheerful|patient|honest|careful|playful|helpful|shy|quick|dreamy",
    "said": "said|said|said|answered|replied",
    "cried": "cried|called|shouted",
    "day": "day|morning|afternoon|evening|sunny morning|rainy day|windy afternoon|cold morning|warm evening",
    "soon": "soon|after a while|before long|a little later",
    "then": "then|after that|next|and so",
    "far": "for a long time|for a whole hour|all morning|until the sun was low|over hill and dale",
    "weather": "the sun was shining|a soft rain was falling|the wind was blowing|the air was still|mist lay over the "
    "fields|the sky was clear and blue|grey clouds hung low",
    "season": "spring|summer|autumn|winter",
    "fast": "quickly|at once|as fast as possible|without a word|with a smile",
    "well": "well|carefully|gently|bravely|patiently|calmly",
    "find": "under a bush|behind a big stone|between two roots|in the tall grass|on top of a fence|beside an old "
    "cart|under a heap of leaves|in an empty bucket",
    "thing": "a pot of honey|a loaf of bread|a bunch of flowers|a jar of jam|a basket of eggs|a bag of nuts|a warm "
    "coat|a letter",
}
MACROS = {key: value.split("|") for key, value in MACROS.items()}

# riddle | answer
RIDDLES = _rows("""
What has hands but cannot hold a cup? | a clock
What grows shorter the longer it stands? | a candle
What has teeth but never bites? | a comb
What has a bed but never sleeps? | a river
What has a neck but no head? | a bottle
What goes up when the rain comes down? | an umbrella
What has one eye but cannot see? | a needle
What is full of holes and still holds water? | a sponge
What has legs but cannot walk? | a table
What follows you all day and hides at night? | your shadow
What can you break without touching it? | a promise
What gets wetter the more it dries? | a towel
""")

# What elders say; a story may come back to it at its end.
SAYINGS = [row[0] for row in _rows("""
a friend is worth more than gold
slow and steady is fast enough
look twice and leap once
kindness costs nothing
every long way begins at the door
a small light is still a light
after the rain comes the sun
two heads are better than one
who asks will find the way
patience makes the pear ripe
""")]

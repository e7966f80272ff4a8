"""Words of living nature by kind: animals, birds, fish, insects, fruits, and vegetables.

The lists were written for this project from general knowledge of English. They hold common names, in lower
case and in the singular where English uses the singular, separated by commas. They are meant to be generous:
a word that an attentive person would accept should be here.
"""

__all__ = ["ANIMALS", "BIRDS", "FRUITS", "INSECTS", "VEGETABLES"]

MAMMALS = """
aardvark, aardwolf, agouti, alpaca, anteater, antelope, ape, arctic fox, argali, armadillo, aurochs,
aye-aye, baboon, badger, bandicoot, barbary sheep, bat, bear, beaver, beluga, bighorn sheep, bilby, bison,
black bear, blue whale, boar, bobcat, bongo, bonobo, brown bear, buffalo, bull, bushbaby, calf, camel,
capuchin, capybara, caracal, caribou, cat, cattle, chamois, cheetah, chimp, chimpanzee, chinchilla,
chipmunk, civet, coati, colobus, colt, cougar, cow, coyote, deer, dhole, dik-dik, dingo, dog, dolphin,
donkey, dormouse, dromedary, dugong, duiker, echidna, eland, elephant, elephant seal, elk, ermine, ewe,
fallow deer, fennec, fennec fox, ferret, flying fox, flying squirrel, fossa, fox, gaur, gazelle, gemsbok,
genet, gerbil, gibbon, giraffe, gnu, goat, gopher, gorilla, gray wolf, grey wolf, grizzly, grizzly bear,
groundhog, guanaco, guinea pig, hamster, hare, harp seal, hartebeest, hedgehog, hippo, hippopotamus, hog,
honey badger, horse, hound, howler monkey, humpback whale, hyena, hyrax, ibex, impala, jackal, jackrabbit,
jaguar, jaguarundi, jerboa, kangaroo, kangaroo rat, kinkajou, kitten, koala, kudu, lamb, langur, lemming,
lemur, leopard, lion, lioness, llama, loris, lynx, macaque, mammoth, manatee, mandrill, margay, markhor,
marmoset, marmot, marten, mastodon, meerkat, mink, mole, mongoose, monkey, moose, mouflon, mountain goat,
mountain lion, mouse, mule, muntjac, musk ox, muskox, muskrat, naked mole rat, narwhal, nilgai, numbat,
nutria, nyala, ocelot, okapi, olingo, opossum, orangutan, orca, oryx, otter, ox, paca, panda, pangolin,
panther, peccary, pig, piglet, pika, pine marten, platypus, polar bear, polecat, pony, porcupine, porpoise,
possum, potoroo, potto, prairie dog, proboscis monkey, pronghorn, przewalski's horse, puma, puppy, quagga,
quokka, quoll, rabbit, raccoon, raccoon dog, ram, rat, red fox, red panda, reindeer, rhino, rhinoceros, roe
deer, sable, saiga, sea cow, sea lion, sea otter, seal, serval, sheep, shrew, siamang, sifaka, skunk, sloth,
sloth bear, snow leopard, spectacled bear, sperm whale, spider monkey, spotted hyena, springbok, squirrel,
squirrel monkey, steer, stoat, sugar glider, sun bear, suricate, takin, tamandua, tamarin, tapir, tarsier,
tasmanian devil, tenrec, tiger, tree shrew, uakari, vervet, vicuna, vizcacha, vole, wallaby, wallaroo,
walrus, warthog, water buffalo, waterbuck, weasel, whale, wild boar, wildcat, wildebeest, wolf, wolverine,
wombat, woodchuck, woolly mammoth, yak, zebra, zebu, zorilla
"""

BIRDS = """
accentor, african grey parrot, albatross, american robin, arctic tern, auk, avocet, babbler, bald eagle,
barbet, barn owl, barn swallow, bee-eater, bellbird, bird of paradise, bittern, black swan, black vulture,
blackbird, blackcap, blue jay, blue tit, bluebird, bluethroat, bobolink, bobwhite, booby, bowerbird,
brambling, brant, budgerigar, budgie, bulbul, bullfinch, bunting, bushtit, bustard, buzzard, caique, canada
goose, canary, canvasback, capercaillie, caracara, cardinal, carrion crow, cassowary, catbird, chaffinch,
chat, chickadee, chicken, chiffchaff, chough, cock, cockatiel, cockatoo, condor, cooper's hawk, coot,
cormorant, corncrake, cotinga, cowbird, crane, crested tit, crossbill, crow, cuckoo, curassow, curlew,
darter, dipper, diver, dodo, dotterel, dove, dowitcher, drake, drongo, duck, dunlin, dunnock, eagle, eagle
owl, eastern bluebird, egret, eider, emperor penguin, emu, eurasian eagle-owl, falcon, fieldfare, finch,
firecrest, flamingo, flicker, flycatcher, fowl, francolin, frigatebird, fulmar, gadwall, gallinule, gannet,
garganey, gnatcatcher, godwit, goldcrest, golden eagle, goldeneye, goldfinch, goosander, goose, goshawk,
grackle, great auk, great blue heron, great horned owl, great tit, grebe, greenfinch, grey parrot, grosbeak,
grouse, guillemot, guineafowl, gull, gyrfalcon, hadada, harpy eagle, harrier, hawfinch, hawk, hen, heron,
herring gull, hoatzin, hobby, hooded crow, hoopoe, hornbill, horned owl, house sparrow, hummingbird, ibis,
indigo bunting, jacana, jackdaw, jaeger, jay, junco, kea, kestrel, killdeer, king penguin, kingbird,
kingfisher, kinglet, kite, kittiwake, kiwi, knot, kookaburra, lammergeier, lanner, lapwing, lark, limpkin,
linnet, loon, lorikeet, lory, lovebird, lyrebird, macaw, magpie, mallard, mandarin duck, martin, meadowlark,
merganser, merlin, minivet, moa, mockingbird, moorhen, motmot, mourning dove, mousebird, munia, mute swan,
myna, mynah, nene, nighthawk, nightingale, nightjar, noddy, northern cardinal, nunbird, nutcracker,
nuthatch, oilbird, oldsquaw, oriole, ortolan, osprey, ostrich, ouzel, ovenbird, owl, owlet, oystercatcher,
parakeet, parrot, partridge, peacock, peafowl, peahen, peewit, pelican, penguin, peregrine, peregrine
falcon, petrel, phalarope, pheasant, phoebe, pigeon, pintail, pipit, pitta, plover, pochard, poorwill,
potoo, ptarmigan, puffin, purple martin, quail, quelea, quetzal, racing pigeon, rail, rainbow lorikeet,
raven, razorbill, red cardinal, red-tailed hawk, redpoll, redshank, redstart, redwing, rhea, roadrunner,
robin, rock dove, roller, rook, rooster, rosefinch, rosella, ruby-throated hummingbird, ruff, sanderling,
sandgrouse, sandhill crane, sandpiper, sapsucker, scaup, scoter, screamer, sea eagle, seagull, secretary
bird, seedeater, seriema, serin, shag, shearwater, shelduck, shoebill, shoveler, shrike, siskin, skimmer,
skua, skylark, smew, snipe, snow bunting, snow goose, snowy egret, snowy owl, song sparrow, song thrush,
sparrow, sparrowhawk, spoonbill, starling, stilt, stint, stonechat, stork, storm petrel, sunbird, swallow,
swan, swift, swiftlet, tanager, tattler, tawny frogmouth, tawny owl, teal, tern, thrasher, thrush, tinamou,
tit, titmouse, toucan, toucanet, towhee, tragopan, treecreeper, trogon, tropicbird, trumpeter swan, tufted
titmouse, turaco, turkey, turkey vulture, turnstone, turtle dove, veery, verdin, vireo, vulture, wagtail,
wallcreeper, warbler, waxbill, waxwing, weaver, weaverbird, wheatear, whimbrel, whinchat, whip-poor-will,
white stork, whitethroat, whooper swan, whooping crane, widgeon, wigeon, wild turkey, willet, wood duck,
wood pigeon, wood stork, wood thrush, woodcock, woodpecker, wren, wrybill, wryneck, yellowhammer,
yellowlegs, yellowthroat, zebra finch
"""

REPTILES_AND_OTHERS = """
abalone, adder, african elephant, alligator, amoeba, amphibian, anaconda, anemone, asian elephant, asp,
axolotl, barnacle, basilisk, bearded dragon, boa, boa constrictor, bullfrog, caiman, centipede, chameleon,
clam, cobra, cockle, conch, copepod, copperhead, coral, coral snake, cottonmouth, crab, crawfish, crayfish,
crocodile, cuttlefish, daddy longlegs, dinosaur, earthworm, flatworm, frog, garter snake, gecko, gharial,
gila monster, hermit crab, horseshoe crab, hydra, iguana, isopod, jellyfish, king cobra, king crab, komodo
dragon, krait, krill, leech, limpet, lizard, lobster, mamba, millipede, mite, mollusk, monitor lizard,
mussel, nautilus, newt, nudibranch, octopus, oyster, periwinkle, pit viper, prawn, python, rattlesnake,
rotifer, salamander, scallop, scorpion, sea anemone, sea cucumber, sea snake, sea star, sea turtle, sea
urchin, shellfish, shrimp, sidewinder, skink, slug, snail, snake, snapping turtle, spider, sponge, squid,
starfish, tadpole, taipan, tarantula, tardigrade, terrapin, tick, toad, tortoise, tree frog, trilobite,
tuatara, turtle, urchin, vampire squid, viper, whelk, wood louse, woodlouse, worm
"""

FISH = """
albacore, amberjack, anchovy, angelfish, anglerfish, archerfish, arowana, barb, barbel, barracuda,
barramundi, basking shark, bass, betta, blackfish, bleak, blenny, blobfish, bluefin, bluefish, bluegill,
bonefish, bonito, bowfin, bream, brill, bullhead, bullhead shark, burbot, butterfish, butterflyfish, carp,
catfish, char, chub, cichlid, clownfish, cobia, cod, coelacanth, coley, crappie, croaker, dab, dace,
damselfish, danio, discus, dogfish, dorado, dory, drum, eel, electric eel, escolar, filefish, flathead,
flounder, fluke, flying fish, frogfish, gar, garfish, giant squid, goatfish, goby, goldfish, gourami,
grayling, great white shark, grouper, grunt, gudgeon, guitarfish, gunnel, guppy, gurnard, haddock, hagfish,
hake, halibut, hammerhead, herring, hoki, huchen, icefish, ide, inconnu, isinglass, jack, john dory,
kingfish, koi, ladyfish, lamprey, lanternfish, ling, lionfish, loach, lumpfish, lungfish, mackerel,
mahi-mahi, manta ray, marlin, menhaden, milkfish, minnow, monkfish, moonfish, moray, moray eel, mudskipper,
mullet, muskellunge, needlefish, nile perch, nurse shark, oarfish, opah, orfe, oscar, paddlefish,
parrotfish, perch, pickerel, pike, pilchard, pilot fish, pipefish, piranha, plaice, pollack, pollock,
pomfret, pompano, porgy, puffer, pufferfish, rabbitfish, rainbow trout, ray, red snapper, redfish, remora,
roach, rockfish, rudd, sablefish, sailfish, salmon, sardine, sawfish, scad, scorpionfish, sculpin, sea bass,
sea bream, seahorse, shad, shark, sheepshead, skate, skipjack, smelt, snapper, snook, sole, sprat,
steelhead, stickleback, stingray, stonefish, sturgeon, sucker, sunfish, surgeonfish, swordfish, tang,
tarpon, tench, tetra, threadfin, thresher, tiger shark, tilapia, tilefish, toadfish, triggerfish, trout,
tuna, turbot, wahoo, walleye, weakfish, weever, wels, whale shark, white shark, whitefish, whiting,
wolffish, wrasse, yellowtail, zander
"""

INSECTS = """
admiral, ant, antlion, aphid, army ant, assassin bug, backswimmer, bed bug, bedbug, bee, beetle, blackfly,
blowfly, bluebottle, boll weevil, botfly, bug, bumblebee, butterfly, caddisfly, carpenter ant, carpenter
bee, caterpillar, chafer, cicada, click beetle, cockchafer, cockroach, crane fly, cricket, cutworm,
damselfly, deathwatch beetle, deerfly, diving beetle, dobsonfly, dragonfly, drone, drosophila, dung beetle,
earwig, emerald ash borer, emperor moth, fire ant, firebug, firefly, flea, flower beetle, fly, froghopper,
fruit fly, fungus gnat, gadfly, gall wasp, glowworm, gnat, goliath beetle, grasshopper, greenfly, ground
beetle, grub, gypsy moth, hawk moth, hercules beetle, honey bee, honeybee, hornet, horntail, horsefly,
housefly, hoverfly, ichneumon, ichneumon wasp, inchworm, io moth, jewel beetle, june bug, junebug, katydid,
killer bee, lacewing, ladybird, ladybug, leaf beetle, leaf insect, leafcutter ant, leafhopper, lice, locust,
longhorn beetle, louse, luna moth, maggot, mantis, mayfly, mealworm, mealybug, midge, mole cricket, monarch,
monarch butterfly, mosquito, moth, nymph, oil beetle, orchid bee, owlfly, painted lady, paper wasp, peacock
butterfly, pill bug, planthopper, pond skater, praying mantis, queen bee, red admiral, rhinoceros beetle,
roach, robber fly, rove beetle, sandfly, sawfly, scale insect, scarab, scarab beetle, scorpionfly, shield
bug, silkworm, silverfish, skipper, snakefly, spittlebug, springtail, stag beetle, stick insect, stink bug,
stonefly, stylops, swallowtail, termite, thrips, tiger beetle, tiger moth, tortoiseshell, treehopper,
tsetse, tsetse fly, walking stick, warble fly, wasp, water boatman, water strider, weevil, whirligig,
whitefly, wood ant, woodwasp, yellow jacket
"""

ANIMALS = ", ".join([MAMMALS, BIRDS, REPTILES_AND_OTHERS, FISH, INSECTS])
"""Any animal counts, so the list holds those of all groups."""

FRUITS = """
acai, acerola, ackee, apple, apricot, aronia, asian pear, avocado, banana, barberry, bilberry, bitter melon,
black cherry, black currant, blackberry, blackcurrant, blood orange, blueberry, boysenberry, breadfruit,
buddha's hand, cacao, cactus pear, calamansi, canary melon, cantaloupe, cape gooseberry, carambola, casaba
melon, cherimoya, cherry, chokeberry, citron, clementine, cloudberry, coconut, cornelian cherry, crab apple,
cranberry, cucumber, currant, custard apple, damson, date, dewberry, dragon fruit, dragonfruit, durian,
eggplant, elderberry, emblica, entawak, feijoa, fig, finger lime, galia melon, goji berry, gooseberry,
granadilla, grape, grapefruit, greengage, ground cherry, guanabana, guarana, guava, hackberry, hawthorn,
hawthorn berry, honeyberry, honeycrisp, honeydew, honeydew melon, huckleberry, icaco, ice apple, ilama,
imbe, indian fig, indian gooseberry, jabuticaba, jackfruit, jambul, jostaberry, jujube, juniper berry, key
lime, kiwano, kiwi, kiwi fruit, kiwifruit, kumquat, langsat, lemon, lime, lingonberry, loganberry, longan,
loquat, lucuma, lychee, mamey, mandarin, mandarin orange, mango, mangosteen, marionberry, medlar, melon,
meyer lemon, miracle fruit, monstera, mulberry, muscadine, muskmelon, nance, naranjilla, nashi, nashi pear,
navel orange, nectarine, noni, nutmeg, olallieberry, olive, orange, oregon grape, oroblanco, papaw, papaya,
passion fruit, passionfruit, pawpaw, peach, pear, pepino, pepper, persimmon, physalis, pineapple, pitaya,
plantain, plum, plumcot, pluot, pomegranate, pomelo, prickly pear, prune, pulasan, pumpkin, quandong,
quince, raisin, rambutan, raspberry, red currant, redcurrant, rhubarb, rose apple, rose hip, rosehip, rowan
berry, safou, salak, salmonberry, santol, sapodilla, sapote, saskatoon, saskatoon berry, satsuma, sea
buckthorn, seville orange, sloe, sour cherry, soursop, star apple, star fruit, starfruit, strawberry, sugar
apple, sweet lime, tamarillo, tamarind, tangelo, tangerine, tangor, tayberry, thimbleberry, tomatillo,
tomato, ugli fruit, umbu, vanilla, velvet apple, watermelon, wax apple, wax jambu, white currant, white
sapote, whitecurrant, whortleberry, wild strawberry, wineberry, winter melon, wolfberry, wood apple, yuzu,
ziziphus
"""

VEGETABLES = """
acorn squash, adzuki bean, alfalfa, alfalfa sprouts, amaranth, artichoke, arugula, asparagus, aubergine,
avocado, baby corn, bamboo shoot, bamboo shoots, basil, bean, bean sprout, bean sprouts, beans, beet,
beetroot, beets, bell pepper, bitter gourd, bitter melon, black bean, black-eyed pea, bok choy, borage,
bottle gourd, broad bean, broccoli, broccoli rabe, broccolini, brussels sprout, brussels sprouts, butter
bean, butter lettuce, buttercup squash, butternut squash, cabbage, caper, cardoon, carrot, carrots, cassava,
cauliflower, cavolo nero, celeriac, celery, celery root, chard, chayote, cherry tomato, chickpea, chickpeas,
chicory, chili, chili pepper, chinese cabbage, chive, chives, choy sum, cilantro, collard, collard greens,
collards, corn, corn salad, courgette, cress, cucumber, daikon, dandelion, dandelion greens, dasheen,
delicata squash, dill, dulse, edamame, eggplant, elephant garlic, endive, english pea, enoki, escarole, fava
bean, fennel, fiddlehead, fiddleheads, french bean, frisee, garbanzo bean, garden pea, garlic, gherkin,
ginger, globe artichoke, gourd, great northern bean, green bean, green beans, green onion, green pea, green
pepper, habanero, haricot bean, hearts of palm, horseradish, hubbard squash, iceberg, iceberg lettuce,
italian parsley, ivy gourd, jalapeno, jerusalem artichoke, jicama, kabocha, kai-lan, kale, kelp, kidney
bean, kohlrabi, komatsuna, lamb's lettuce, leaf lettuce, leek, leeks, lemongrass, lentil, lentils, lettuce,
lima bean, lima beans, loofah, lotus root, luffa, maize, malanga, mange tout, marrow, mesclun, mizuna, mung
bean, mung beans, mushroom, mushrooms, mustard, mustard greens, napa cabbage, navy bean, nettle, nettles,
new potato, nopal, nori, oca, okra, olive, onion, onions, orache, oyster mushroom, pak choi, parsley,
parsnip, parsnips, pattypan squash, pea, peas, pepper, peppers, pickle, pinto bean, poblano, portobello,
potato, potatoes, pumpkin, purslane, radicchio, radish, radishes, rampion, ramps, rapini, red cabbage, red
onion, red pepper, rhubarb, rocket, romaine, romaine lettuce, romanesco, runner bean, rutabaga, sage,
salsify, samphire, savoy cabbage, scallion, scallions, sea kale, seaweed, shallot, shallots, shiitake,
skirret, snap pea, snap peas, snow pea, snow peas, sorrel, soybean, soybeans, spaghetti squash, spinach,
split pea, spring onion, sprout, sprouts, squash, string bean, string beans, sugar snap pea, sunchoke,
swede, sweet corn, sweet pepper, sweet potato, sweetcorn, swiss chard, tabasco pepper, taro, tatsoi,
tomatillo, tomato, tomatoes, truffle, turnip, turnip greens, turnips, ulluco, wakame, wasabi, water
chestnut, water chestnuts, water spinach, watercress, wax bean, wax gourd, white radish, wild leek, winter
melon, winter squash, witloof, yam, yams, yardlong bean, yellow pepper, yellow squash, yuca, zucchini
"""

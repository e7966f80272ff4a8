"""Words of people by kind: body parts, clothes, countries, first names, jobs, languages, and sports.

The lists were written for this project from general knowledge of English, in the form that `nature_words`
describes. `COUNTRIES` holds the members of the United Nations and its two observers, with the short names
under which people know them, and Kosovo, Taiwan, and the countries of the United Kingdom.
"""

__all__ = [
    "BODY_PARTS",
    "CLOTHES",
    "COUNTRIES",
    "FIRST_NAMES",
    "JOBS",
    "LANGUAGES",
    "SPORTS",
]

COUNTRIES = """
afghanistan, albania, algeria, andorra, angola, antigua and barbuda, argentina, armenia, australia, austria,
azerbaijan, bahamas, bahrain, bangladesh, barbados, belarus, belgium, belize, benin, bhutan, bolivia,
bosnia, bosnia and herzegovina, botswana, brazil, brunei, bulgaria, burkina faso, burma, burundi, cabo
verde, cambodia, cameroon, canada, cape verde, central african republic, chad, chile, china, colombia,
comoros, congo, costa rica, cote d'ivoire, croatia, cuba, cyprus, czech republic, czechia, democratic
republic of the congo, denmark, djibouti, dominica, dominican republic, east timor, ecuador, egypt, el
salvador, england, equatorial guinea, eritrea, estonia, eswatini, ethiopia, fiji, finland, france, gabon,
gambia, georgia, germany, ghana, great britain, greece, grenada, guatemala, guinea, guinea-bissau, guyana,
haiti, holland, holy see, honduras, hungary, iceland, india, indonesia, iran, iraq, ireland, israel, italy,
ivory coast, jamaica, japan, jordan, kazakhstan, kenya, kiribati, kosovo, kuwait, kyrgyzstan, laos, latvia,
lebanon, lesotho, liberia, libya, liechtenstein, lithuania, luxembourg, macedonia, madagascar, malawi,
malaysia, maldives, mali, malta, marshall islands, mauritania, mauritius, mexico, micronesia, moldova,
monaco, mongolia, montenegro, morocco, mozambique, myanmar, namibia, nauru, nepal, netherlands, new zealand,
nicaragua, niger, nigeria, north korea, north macedonia, northern ireland, norway, oman, pakistan, palau,
palestine, panama, papua new guinea, paraguay, peru, philippines, poland, portugal, qatar, romania, russia,
rwanda, saint kitts and nevis, saint lucia, saint vincent and the grenadines, samoa, san marino, sao tome
and principe, saudi arabia, scotland, senegal, serbia, seychelles, sierra leone, singapore, slovakia,
slovenia, solomon islands, somalia, south africa, south korea, south sudan, spain, sri lanka, sudan,
suriname, swaziland, sweden, switzerland, syria, taiwan, tajikistan, tanzania, thailand, timor-leste, togo,
tonga, trinidad and tobago, tunisia, turkey, turkiye, turkmenistan, tuvalu, uganda, ukraine, united arab
emirates, united kingdom, united states, united states of america, uruguay, uzbekistan, vanuatu, vatican
city, venezuela, vietnam, wales, yemen, zambia, zimbabwe
"""

LANGUAGES = """
abkhaz, acehnese, afrikaans, akan, albanian, amharic, ancient greek, apache, arabic, aragonese, aramaic,
armenian, assamese, asturian, avar, aymara, azerbaijani, balinese, balochi, bambara, bashkir, basque,
belarusian, bemba, bengali, berber, bhojpuri, bislama, bosnian, brahui, breton, bulgarian, burmese,
cantonese, catalan, cebuano, chechen, cherokee, chewa, chichewa, chinese, chuvash, comanche, coptic,
cornish, corsican, cree, creole, croatian, czech, dakota, danish, dari, dhivehi, dinka, dogri, dutch,
dzongkha, egyptian, english, erzya, esperanto, estonian, ewe, faroese, farsi, fijian, filipino, finnish,
flemish, fon, french, frisian, friulian, fula, fulani, gaelic, gagauz, galician, ganda, georgian, german,
gilbertese, gothic, greek, greenlandic, guarani, gujarati, haitian, haitian creole, hakka, hausa, hawaiian,
hebrew, herero, hiligaynon, hindi, hindustani, hmong, hopi, hungarian, ibibio, icelandic, ido, igbo,
ilocano, indonesian, ingush, interlingua, inuit, inuktitut, irish, irish gaelic, italian, japanese,
javanese, kannada, kanuri, kashmiri, kazakh, khmer, kikuyu, kinyarwanda, kirundi, klingon, komi, kongo,
konkani, korean, kurdish, kyrgyz, ladin, ladino, lakota, lao, latin, latvian, lezgian, limburgish, lingala,
lithuanian, luganda, luo, luxembourgish, macedonian, magyar, maithili, malagasy, malay, malayalam,
maldivian, maltese, manchu, mandarin, mandarin chinese, mandinka, manx, maori, mapuche, marathi,
marshallese, mayan, mende, middle english, mohawk, moldovan, mongolian, montenegrin, nahuatl, nauruan,
navajo, ndebele, neapolitan, nepali, newari, nogai, norse, northern sami, norwegian, nyanja, occitan, odia,
ojibwe, old english, old norse, oriya, oromo, osage, ossetian, papiamento, pashto, persian, pidgin,
pitjantjatjara, polish, portuguese, provencal, punjabi, quechua, rapa nui, romani, romanian, romansh, rundi,
russian, rusyn, rwanda, saami, sami, samoan, sango, sanskrit, santali, saraiki, sardinian, scots, scottish
gaelic, serbian, serbo-croatian, sesotho, setswana, shanghainese, shona, sicilian, silesian, sindhi,
sinhala, sinhalese, slovak, slovene, slovenian, somali, sorbian, sotho, spanish, sumerian, sundanese,
swahili, swazi, swedish, swiss german, syriac, tagalog, tahitian, taiwanese, tajik, tamil, tatar, telugu,
tetum, thai, tibetan, tigre, tigrinya, tok pisin, tongan, tsonga, tswana, tulu, tupi, turkish, turkmen,
tuvaluan, twi, udmurt, ukrainian, umbundu, urdu, uyghur, uzbek, venda, venetian, vietnamese, volapuk, votic,
walloon, waray, warlpiri, welsh, west frisian, wolof, wu, wu chinese, xhosa, yakut, yiddish, yoruba, yucatec
maya, zapotec, zulu
"""

JOBS = """
account manager, accountant, acrobat, activist, actor, actress, actuary, acupuncturist, administrator,
adviser, advisor, advocate, agent, air traffic controller, aircraft mechanic, airline pilot, ambassador,
ambulance driver, analyst, anatomist, anchor, anesthesiologist, animator, announcer, anthropologist,
apothecary, appraiser, apprentice, arbitrator, archaeologist, archer, architect, archivist, art dealer, art
director, art teacher, artisan, artist, assembler, assessor, assistant, astrologer, astronaut, astronomer,
athlete, attendant, attorney, auctioneer, audiologist, auditor, author, auto mechanic, babysitter, bailiff,
baker, ballerina, ballet dancer, bank manager, bank teller, banker, barber, bargeman, barista, barkeeper,
barman, barrister, bartender, beautician, beekeeper, biochemist, biographer, biologist, blacksmith, blogger,
boatman, bodyguard, boilermaker, bookbinder, bookkeeper, bookseller, botanist, bouncer, boxer, brand
manager, brewer, bricklayer, broadcaster, broker, builder, bus driver, businessman, businesswoman, butcher,
butler, buyer, cab driver, cabinetmaker, cameraman, captain, cardiologist, care worker, caregiver,
caretaker, carpenter, cartographer, cartoonist, cashier, caterer, chaplain, chauffeur, cheesemonger, chef,
chemical engineer, chemist, child psychologist, chimney sweep, chiropractor, choreographer, civil engineer,
civil servant, claims adjuster, cleaner, clergyman, clerk, clinician, clockmaker, clown, coach, coal miner,
cobbler, collector, columnist, comedian, commander, commentator, composer, computer engineer, computer
programmer, computer scientist, concierge, conductor, conservationist, conservator, construction worker,
consultant, contractor, cook, copywriter, coroner, correspondent, cosmetologist, counsellor, counselor,
courier, courtier, cowboy, craftsman, crane operator, critic, curator, custodian, customs officer, dancer,
data analyst, data engineer, data entry clerk, data scientist, database administrator, dealer, decorator,
delivery driver, demographer, dental assistant, dental hygienist, dentist, dermatologist, designer,
detective, developer, dietician, dietitian, diplomat, director, disc jockey, dishwasher, dispatcher, diver,
dj, doctor, dog trainer, dog walker, doorman, draftsman, dramatist, dressmaker, driver, driving instructor,
drummer, dry cleaner, dyer, ecologist, economist, editor, educator, electrical engineer, electrician,
elementary school teacher, embalmer, embroiderer, emergency medical technician, emt, endocrinologist,
engineer, engraver, entertainer, entomologist, entrepreneur, environmentalist, epidemiologist, estate agent,
esthetician, ethnographer, evaluator, event manager, event planner, examiner, executive, executive
assistant, exterminator, fabricator, factory worker, farmer, farmhand, fashion designer, fashion model,
ferryman, film director, filmmaker, financial advisor, financial analyst, financial manager, financier,
firefighter, fireman, fisher, fisherman, fishmonger, fitness instructor, fitness trainer, flight attendant,
flight engineer, florist, flutist, food critic, food scientist, football player, foreman, forensic
scientist, forester, fortune teller, fruit picker, fundraiser, funeral director, furrier, game designer,
game developer, gamekeeper, garbage collector, gardener, gas station attendant, gemologist, genealogist,
general, general manager, general practitioner, geneticist, geographer, geologist, geophysicist,
ghostwriter, glassblower, glazier, goalkeeper, goatherd, goldsmith, golfer, governess, governor, graphic
artist, graphic designer, gravedigger, greengrocer, grocer, groom, groundskeeper, guard, guide, guitarist,
gunsmith, gymnast, gynecologist, hacker, hairdresser, hairstylist, handyman, harbormaster, hatter,
headhunter, headmaster, healer, health inspector, herald, herbalist, herder, hiring manager, historian, home
health aide, home inspector, homemaker, horticulturist, hospital administrator, host, hostess, hotel
manager, hotelier, house cleaner, house painter, housekeeper, housewife, human resources manager, hunter,
hydrologist, hygienist, hypnotist, ice cream maker, illusionist, illustrator, immunologist, importer,
industrial designer, industrial engineer, influencer, information technologist, innkeeper, inspector,
installer, instructor, insurance adjuster, insurance agent, insurance broker, interior decorator, interior
designer, intern, internist, interpreter, interviewer, inventor, investigator, investment banker, investor,
ironmonger, ironworker, jailer, janitor, jeweler, jeweller, jockey, joiner, journalist, judge, juggler,
jurist, keeper, kindergarten teacher, knight, lab assistant, lab technician, laboratory technician, laborer,
land surveyor, landlord, landscape architect, landscaper, laundress, law clerk, lawn care worker, lawn
mower, lawyer, lecturer, legal assistant, legislator, lexicographer, librarian, library assistant,
lieutenant, life coach, lifeguard, lighthouse keeper, lineman, linguist, loan officer, lobbyist, locksmith,
logger, logistician, longshoreman, lumberjack, machinist, magician, magistrate, maid, mail carrier, mailman,
maintenance worker, maitre d, makeup artist, manager, manicurist, manufacturer, marine biologist, market
researcher, marketer, marketing manager, marshal, mason, massage therapist, masseur, masseuse,
mathematician, mayor, mechanic, mechanical engineer, mediator, medic, medical assistant, medical examiner,
mentor, merchant, messenger, metallurgist, metalworker, meteorologist, microbiologist, midwife, military
officer, milkman, miller, milliner, miner, minister, missionary, model, moderator, monk, mortician,
motivational speaker, mover, music teacher, musician, nail technician, nanny, naturalist, navigator, navy
officer, negotiator, network engineer, neurologist, neuroscientist, neurosurgeon, news anchor, newscaster,
newsreader, novelist, nuclear engineer, nun, nurse, nurse practitioner, nursery teacher, nutritionist,
obstetrician, occupational therapist, oceanographer, office manager, office worker, officer, oncologist,
opera singer, operations manager, operator, ophthalmologist, optician, optometrist, orderly, organist,
organizer, ornithologist, orthodontist, orthopedist, osteopath, packer, painter, paleontologist, panelist,
paralegal, paramedic, park ranger, parking attendant, parliamentarian, pastor, pastry chef, patent attorney,
pathologist, patrolman, peddler, pediatrician, pentester, performer, personal assistant, personal trainer,
pest control technician, pharmacist, philosopher, phlebotomist, photographer, photojournalist, physical
therapist, physician, physicist, physiologist, physiotherapist, pianist, piano teacher, piano tuner, pilot,
plasterer, playwright, plumber, podiatrist, poet, police chief, police officer, policeman, policewoman,
politician, porter, post office clerk, postal worker, postman, potter, preacher, president, press officer,
priest, prime minister, principal, printer, prison guard, prison officer, private detective, private
investigator, probation officer, producer, product manager, professor, programmer, project manager,
proofreader, prosecutor, psychiatrist, psychologist, psychotherapist, publicist, publisher, puppet master,
puppeteer, purser, rabbi, race car driver, radiographer, radiologic technologist, radiologist, railway
worker, rancher, ranger, rapper, real estate agent, realtor, receptionist, recruiter, referee,
reflexologist, registered nurse, registrar, repairman, reporter, representative, research assistant,
research scientist, researcher, respiratory therapist, restaurant manager, restaurateur, restorer, retailer,
reviewer, rigger, roofer, sailor, sales associate, sales manager, sales representative, salesman,
salesperson, saleswoman, sanitation worker, school principal, scientist, scout, screenwriter, scribe,
sculptor, seaman, seamstress, secretary, security guard, seismologist, senator, sergeant, servant, server,
set designer, shepherd, sheriff, ship captain, shipwright, shoemaker, shop assistant, shopkeeper,
silversmith, singer, skipper, smith, social media manager, social worker, sociologist, software developer,
software engineer, soldier, solicitor, sommelier, sonographer, sound engineer, special education teacher,
speech therapist, spy, stagehand, statesman, statistician, stenographer, steward, stewardess, stockbroker,
stonemason, store manager, storekeeper, storyteller, street sweeper, structural engineer, stuntman, stylist,
surgeon, surveyor, swimmer, swimming instructor, systems administrator, systems analyst, tailor, tanner,
tattoo artist, tax collector, tax preparer, taxi driver, taxidermist, teacher, teaching assistant, team
leader, technical writer, technician, technologist, telemarketer, telephone operator, teller, tennis player,
therapist, tiler, toolmaker, tour guide, tour operator, toxicologist, trader, tradesman, traffic warden,
train conductor, train driver, trainer, translator, travel agent, travel guide, travel writer, treasurer,
tree surgeon, trooper, truck driver, trucker, tutor, typesetter, typist, umpire, undertaker, underwriter,
upholsterer, urban planner, urologist, usher, valet, vendor, ventriloquist, vet, veterinarian, veterinary
technician, vicar, video editor, video game designer, videographer, vintner, violinist, virologist,
vocalist, voice actor, volcanologist, waiter, waitress, warden, warehouse worker, warrior, watchmaker,
watchman, weather forecaster, weatherman, weaver, web designer, web developer, wedding planner,
weightlifter, welder, wholesaler, wildlife biologist, window cleaner, window washer, winemaker, woodcarver,
woodcutter, woodworker, wrestler, writer, yoga instructor, yoga teacher, youth worker, zookeeper, zoologist
"""

SPORTS = """
abseiling, acrobatics, aerobatics, aerobics, aikido, air hockey, air racing, airsoft, alpine skiing,
american football, angling, aquathlon, archery, arena football, arm wrestling, artistic gymnastics, artistic
swimming, association football, athletics, australian football, australian rules football, auto racing,
autocross, badminton, ball hockey, ballooning, bandy, base jumping, baseball, basketball, basque pelota,
beach handball, beach soccer, beach volleyball, biathlon, bicycle racing, big wave surfing, billiards, bmx,
bmx racing, boating, bobsled, bobsleigh, bocce, boccia, bodyboarding, bodybuilding, bouldering, boules,
bowling, bowls, boxing, brazilian jiu-jitsu, breakdancing, breaking, bridge, broomball, bull riding,
bullfighting, camogie, canoe polo, canoe slalom, canoeing, canyoning, capoeira, car racing, chariot racing,
cheerleading, chess, clay pigeon shooting, cliff diving, climbing, competitive swimming, cricket, croquet,
cross country, cross country running, cross country skiing, cross-country skiing, crossfit, curling,
cycling, cyclo-cross, dance, dancing, darts, decathlon, deep sea fishing, demolition derby, dirt biking,
disc golf, discus, discus throw, diving, dodgeball, dog racing, dog sledding, downhill skiing, drag racing,
dragon boat, dragon boat racing, dressage, drifting, duathlon, endurance riding, endurance running, enduro,
equestrian, equestrianism, eskrima, eventing, extreme ironing, extreme sports, falconry, fell running,
fencing, field hockey, figure skating, fishing, fistball, five-a-side football, flag football, floor hockey,
floorball, fly fishing, foosball, football, footvolley, formula 1, formula one, formula racing, free diving,
free running, freediving, freestyle skiing, freestyle swimming, freestyle wrestling, frisbee, frisbee golf,
futsal, gaelic football, gliding, go-karting, goalball, golf, grappling, greco-roman wrestling, greyhound
racing, gymnastics, half marathon, hammer throw, handball, hang gliding, harness racing, heptathlon, high
diving, high jump, hiking, hockey, horse racing, horse riding, horseback riding, horseshoes, hunting,
hurdles, hurdling, hurling, ice climbing, ice dancing, ice fishing, ice hockey, ice sailing, ice skating,
indoor cricket, indoor cycling, indoor football, indoor rowing, indoor soccer, indy car racing, inline
hockey, inline skating, international rules football, iron man, jai alai, javelin, javelin throw, jet
skiing, jiu-jitsu, jogging, jousting, ju-jitsu, judo, jujitsu, jump rope, kabaddi, karate, karting,
kayaking, kendo, kho kho, kickball, kickboxing, kite surfing, kiteboarding, kitesurfing, korfball, krav
maga, kung fu, lacrosse, land sailing, laser tag, lawn bowling, lawn bowls, lawn tennis, log rolling, long
distance running, long jump, longboarding, luge, marathon, marathon running, martial arts, microlighting,
middle distance running, mini golf, miniature golf, mixed martial arts, modern pentathlon, motocross, motor
racing, motorboat racing, motorcycle racing, motorcycling, motorsport, mountain biking, mountain climbing,
mountaineering, muay thai, naginata, nascar, netball, nine-ball, nordic combined, nordic skiing, nordic
walking, obstacle course racing, ocean rowing, off-road racing, olympic weightlifting, open water swimming,
orienteering, paddle boarding, paddle tennis, paddleball, paddleboarding, padel, paintball, parachuting,
paragliding, parasailing, parkour, pelota, pentathlon, petanque, pickleball, pigeon racing, pilates, ping
pong, pistol shooting, platform tennis, pole vault, pole vaulting, polo, pool, powerboating, powerlifting,
quad biking, quadball, quidditch, quoits, race walking, racing, racquetball, racquets, rafting, rally,
rallying, rappelling, real tennis, relay race, rhythmic gymnastics, ringette, river rafting, road cycling,
road racing, rock climbing, rodeo, roller derby, roller hockey, roller skating, rollerblading, rope
climbing, rope skipping, rounders, rowing, rugby, rugby league, rugby sevens, rugby union, running,
sailboarding, sailing, sambo, scuba diving, sculling, sea kayaking, sepak takraw, shinty, shooting, short
track speed skating, shot put, shuffleboard, skateboarding, skating, skeet shooting, skeleton, ski jumping,
skiing, skimboarding, skipping, skydiving, slacklining, slalom, sledding, snooker, snorkeling, snowboarding,
snowmobiling, snowshoeing, soccer, softball, speed skating, speedway, sprint, sprinting, squash,
steeplechase, stock car racing, street hockey, street luge, strongman, sumo, sumo wrestling, surf
lifesaving, surfing, swimming, synchronized diving, synchronized skating, synchronized swimming, table
football, table hockey, table tennis, taekwondo, tag rugby, tai chi, target shooting, team handball,
tee-ball, tennikoit, tennis, tenpin bowling, tetherball, thai boxing, throwball, tobogganing, touch
football, touch rugby, track, track and field, track cycling, trail running, trampoline, trampolining,
trapshooting, trekking, triathlon, triple jump, tug of war, tumbling, ultimate, ultimate fighting, ultimate
frisbee, ultramarathon, underwater hockey, unicycling, vaulting, vert skating, volleyball, wakeboarding,
walking, water aerobics, water polo, water skiing, water volleyball, waterskiing, weight lifting,
weightlifting, wheelchair basketball, wheelchair racing, wheelchair rugby, wheelchair tennis, white water
rafting, whitewater rafting, windsurfing, wing chun, wing foiling, winter swimming, wrestling, wushu, yacht
racing, yachting, yoga, zorbing
"""

BODY_PARTS = """
abdomen, achilles tendon, adam's apple, adenoids, adrenal ankle, anus, aorta, appendix, arm, armpit, artery,
articular cartilage, axial skeleton, axilla, back, backbone, backside, ball, beard, belly, belly button,
bicep, biceps, big toe, bladder, blood, blood vessel, bone, bone marrow, bosom, bottom, bowel, brain,
brainstem, breast, breastbone, bronchus, brow, buttock, buttocks, calf, capillary, carotid artery,
cartilage, cerebellum, cerebrum, cervix, cheek, cheekbone, chest, chin, clavicle, coccyx, cochlea,
collarbone, colon, cornea, cranium, crown, cuticle, deltoid, dermis, diaphragm, digit, dimple, disc,
duodenum, ear, ear canal, eardrum, earlobe, elbow, enamel, epidermis, epiglottis, esophagus, eustachian
tube, eye, eyeball, eyebrow, eyelash, eyelid, face, facial hair, fallopian tube, femoral artery, femur,
fibula, finger, fingernail, fingertip, fist, flank, foot, foot arch, forearm, forehead, foreskin, freckle,
frontal lobe, funny bone, gall bladder, gallbladder, genitals, gland, glottis, gluteus maximus, groin,
gullet, gum, gums, gut, guts, hair, hair follicle, hamstring, hand, head, heart, heel, hip, hip bone,
hippocampus, humerus, hypothalamus, ileum, iliac bone, ilium, incisor, index finger, inner ear, inner thigh,
instep, intestine, intestines, iris, ischium, jaw, jawbone, jejunum, joint, jugular vein, kidney, kidneys,
knee, kneecap, knuckle, knuckles, labia, lachrymal gland, lap, large intestine, larynx, lash, leg, lens,
ligament, limb, lip, lips, little finger, little toe, liver, lobe, loin, lower back, lower leg, lumbar
spine, lung, lungs, lymph node, mandible, marrow, maxilla, metacarpal, metatarsal, middle ear, middle
finger, midriff, molar, mole, mouth, muscle, mustache, nail, nape, nasal bone, nasal cavity, navel, neck,
nerve, nerves, neuron, nipple, nose, nostril, nostrils, occipital bone, occipital lobe, oesophagus, optic
nerve, oral cavity, organ, ovary, palate, palm, pancreas, parietal lobe, patella, pectoral, pelvis, penis,
pharynx, pinkie, pinky, pituitary gland, placenta, pore, prostate, pupil, quad, quadriceps, radius, rear,
rectum, red blood cell, retina, rib, rib cage, ribcage, ribs, ring finger, root, rotator cuff, rump, sacrum,
saliva, salivary gland, scalp, scapula, sciatic nerve, sclera, scrotum, septum, shin, shinbone, shoulder,
shoulder blade, sinus, skeleton, skin, skull, small intestine, small of the back, solar plexus, sole, spinal
cord, spine, spleen, sternum, stomach, sweat gland, tailbone, talus, tarsus, taste bud, tear duct, teeth,
temple, temporal lobe, tendon, testicle, testicles, testis, thigh, thigh bone, thighbone, thorax, throat,
thumb, thumbnail, thymus, thyroid, thyroid gland, tibia, toe, toenail, toes, tongue, tonsil, tonsils, tooth,
torso, trachea, trapezius, triceps, trunk, tummy, ulna, umbilicus, upper arm, upper back, upper lip, ureter,
urethra, uterus, uvula, vagina, vein, veins, ventricle, vertebra, vertebrae, vocal cord, vocal cords, waist,
white blood cell, windpipe, wisdom tooth, womb, wrist, wrist bone
"""

CLOTHES = """
anklet, anorak, apron, ascot, baby doll, balaclava, ball gown, bandana, baseball cap, bathing suit,
bathrobe, beanie, belt, beret, bermuda shorts, bikini, blazer, bloomers, blouse, boa, boater, bodice,
bodysuit, bolero, bomber jacket, bonnet, boot, boots, bow tie, bowler, bowler hat, boxer shorts, boxers,
bra, bracelet, braces, brassiere, breeches, briefs, brogue, brogues, button-down, caftan, camisole, cap,
cape, capris, cardigan, cargo pants, cargo shorts, cassock, chador, chaps, chemise, cheongsam, chinos,
cloak, clog, clogs, coat, corduroys, corset, costume, coveralls, cowboy boots, cowboy hat, cravat, crop top,
cufflinks, culottes, cummerbund, dashiki, denim, denim jacket, denim jeans, derby, diaper, dinner jacket,
dirndl, djellaba, doublet, dress, dress shirt, dress shoes, dressing gown, duffel coat, dungarees, earmuffs,
earring, earrings, espadrille, espadrilles, evening dress, evening gown, eyeglasses, face mask, fedora, fez,
fishnets, flannel shirt, flannels, flares, flats, fleece, flip-flop, flip-flops, frock, frock coat, fur
coat, galoshes, garter, gilet, girdle, glasses, glove, gloves, goggles, gown, hakama, halter top,
handkerchief, harem pants, hat, hawaiian shirt, headband, headscarf, heels, high heels, high-heels, hijab,
hooded sweatshirt, hoodie, hose, hosiery, hot pants, housecoat, insole, inverness cape, jacket, jeans,
jersey, jodhpurs, jumper, jumpsuit, kaftan, kameez, kilt, kimono, kippah, knickerbockers, knickers, lab
coat, leather jacket, leg warmers, leggings, leotard, life jacket, lingerie, loafer, loafers, loincloth,
long johns, mackintosh, maillot, mantilla, mantle, maxi dress, mini skirt, minidress, miniskirt, mitten,
mittens, moccasin, moccasins, morning coat, muffler, mules, muumuu, neckerchief, necklace, necktie,
negligee, nightcap, nightdress, nightgown, nightie, nightshirt, niqab, nylons, obi, overalls, overcoat,
overshoes, oxford, oxford shirt, oxfords, pajamas, panama hat, panties, pants, pantsuit, pantyhose, parka,
pashmina, peacoat, peignoir, petticoat, pinafore, plus fours, polo, polo shirt, poncho, pullover, pumps,
pyjamas, rain boots, rain jacket, raincoat, ring, robe, romper, running shoes, sable, salwar, salwar kameez,
sandal, sandals, sari, sarong, scarf, school uniform, shawl, shift, shift dress, shirt, shoe, shoes, shorts,
shrug, silk scarf, ski boots, ski mask, skirt, skort, slacks, sleeve, slip, slipper, slippers, smock,
snapback, sneaker, sneakers, snow boots, snowsuit, sock, socks, sombrero, spats, stiletto, stockings, stole,
suit, suit jacket, sun hat, sundress, sunglasses, suspenders, sweat pants, sweater, sweater vest,
sweatpants, sweatshirt, swim trunks, swimming trunks, swimsuit, swimwear, t-shirt, tabard, tailcoat, tallit,
tank top, tee, tee shirt, thobe, thong, tiara, tie, tights, toga, top, top hat, track pants, trackpants,
tracksuit, trainers, trench coat, trenchcoat, trilby, trousers, trunks, tube top, tunic, tuque, turban,
turtleneck, tutu, tuxedo, twinset, underclothes, undergarment, underpants, undershirt, underwear, uniform,
unitard, veil, vest, visor, waders, waistcoat, watch, wedding dress, wellies, wellington boots, wellingtons,
wet suit, wetsuit, wig, windbreaker, windcheater, winter coat, wool hat, wool sweater, woolly hat, work
boots, wrap, wrap dress, wristband, wristwatch, yarmulke, yoga pants, zoot suit
"""

FIRST_NAMES = """
aaliyah, aaron, abby, abdul, abel, abigail, abraham, ada, adam, adele, adeline, adrian, adriana, adrienne,
agatha, agnes, ahmed, aidan, aiden, aileen, aimee, aisha, alan, albert, alberto, alejandra, alejandro, alex,
alexa, alexander, alexandra, alexia, alexis, alfonso, alfred, ali, alice, alicia, alina, alison, allan,
allen, allison, alma, alvin, alyssa, amanda, amber, amelia, amir, amy, ana, anastasia, andre, andrea,
andreas, andres, andrew, andy, angel, angela, angelica, angelina, angie, anita, ann, anna, annabel,
annabelle, anne, annette, annie, anthony, antoine, anton, antonia, antonio, april, archie, ariana, arianna,
ariel, arlene, arnold, arthur, arturo, asher, ashley, athena, aubrey, audrey, august, augustus, aurora,
austin, autumn, ava, avery, axel, ayesha, barbara, barney, barry, bart, basil, beatrice, beatrix, becky,
bella, ben, benedict, benjamin, bennett, benny, bernadette, bernard, bernice, bernie, bert, bertha, bessie,
beth, bethany, betsy, betty, beverly, bianca, bill, billie, billy, blair, blake, blanche, bob, bobbie,
bobby, bonnie, boris, brad, bradley, brady, brandon, brandy, brenda, brendan, brent, brett, brian, brianna,
bridget, britney, brittany, brock, brody, brooke, brooklyn, bruce, bruno, bryan, bryce, byron, caitlin,
caleb, callum, calvin, cameron, camila, camille, candace, candice, cara, carl, carla, carlos, carlton,
carly, carmen, carol, carole, carolina, caroline, carolyn, carrie, carson, carter, cary, casey, cassandra,
cassie, catherine, cathy, cecil, cecilia, cedric, celeste, celia, cesar, chad, chandler, charlene, charles,
charlie, charlotte, chase, chelsea, cheryl, chester, chloe, chris, christian, christie, christina,
christine, christopher, christy, chuck, cindy, claire, clara, clare, clarence, clarissa, clark, claude,
claudia, clay, clayton, clement, cleo, clifford, clifton, clint, clinton, clive, clyde, cody, cole, colin,
colleen, collin, connie, connor, conor, conrad, constance, cooper, cora, corey, cory, courtney, craig,
cristina, crystal, curtis, cynthia, cyril, cyrus, daisy, dakota, dale, dallas, damian, damien, damon, dan,
dana, daniel, daniela, danielle, danny, dante, daphne, darius, darlene, darren, darryl, daryl, dave, david,
dawn, dean, deanna, debbie, deborah, debra, declan, deirdre, delia, delilah, della, delores, demetrius,
dena, denise, dennis, derek, derrick, desmond, destiny, devin, devon, dexter, diana, diane, dianne, dick,
diego, dimitri, dina, dirk, dolly, dolores, dominic, dominique, don, donald, donna, donovan, dora, doreen,
doris, dorothy, doug, douglas, drew, duane, dudley, duke, duncan, dustin, dwayne, dwight, dylan, earl,
ebony, ed, eddie, eden, edgar, edith, edmund, edna, eduardo, edward, edwin, eileen, elaine, eleanor, elena,
eli, elias, elijah, elisa, elise, eliza, elizabeth, ella, ellen, ellie, elliot, elliott, ellis, elmer,
eloise, elsa, elsie, elton, elvira, elvis, emanuel, emerson, emil, emilia, emilio, emily, emma, emmanuel,
emmett, enrique, eric, erica, erick, erik, erika, erin, ernest, ernesto, ernie, erwin, esmeralda, esteban,
estelle, esther, ethan, ethel, eugene, eunice, eva, evan, evangeline, eve, evelyn, everett, evie, ezekiel,
ezra, fabian, faith, fatima, faye, federico, felicia, felicity, felipe, felix, fernando, fidel, finley,
finn, fiona, fletcher, flora, florence, floyd, forrest, frances, francesca, francine, francis, francisco,
frank, frankie, franklin, fred, freda, freddie, freddy, frederick, freya, fritz, gabby, gabriel, gabriela,
gabriella, gabrielle, gail, gareth, garrett, garry, gary, gavin, gemma, gene, genevieve, geoffrey, george,
georgia, georgina, gerald, geraldine, gerard, gerardo, gertrude, gianna, gideon, gilbert, gina, ginger,
giovanni, gisele, giselle, gladys, glen, glenda, glenn, gloria, gordon, grace, gracie, graham, grant, greg,
gregg, gregory, greta, gretchen, griffin, guadalupe, guillermo, gus, gustavo, guy, gwen, gwendolyn, hadley,
hailey, hal, haley, hamza, hank, hannah, hans, harley, harold, harper, harriet, harris, harrison, harry,
harvey, hassan, hattie, hayden, hayley, hazel, heath, heather, hector, heidi, helen, helena, helga,
henrietta, henry, herbert, herman, hilary, hilda, hillary, hiram, holly, homer, hope, horace, howard,
hubert, hudson, hugh, hugo, humphrey, hunter, ian, ibrahim, ida, ignacio, igor, ike, imani, imogen, ina,
india, indira, ines, inez, ingrid, ira, irene, iris, irma, irving, isaac, isabel, isabella, isabelle,
isaiah, isla, ismael, israel, issac, ivan, ivana, ivy, jack, jackie, jackson, jacob, jacqueline, jade,
jaime, jake, jamal, james, jamie, jan, jane, janet, janice, jared, jasmine, jason, jasper, jay, jean, jeff,
jeffrey, jenna, jennifer, jenny, jeremiah, jeremy, jerome, jerry, jesse, jessica, jesus, jill, jim, jimmy,
joan, joanna, joanne, jodi, joe, joel, john, johnny, jon, jonah, jonathan, jordan, jorge, jose, joseph,
josephine, joshua, josie, joy, joyce, juan, juanita, judith, judy, julia, julian, julie, juliet, julio,
june, justin, karen, karl, kate, katherine, kathleen, kathryn, kathy, katie, kayla, keith, kelly, kelsey,
ken, kendra, kenneth, kenny, kent, kerry, kevin, kim, kimberly, kirk, kristen, kristin, kristina, kurt,
kyle, kylie, lacey, lana, lance, landon, lara, larry, lars, latoya, laura, lauren, laurence, laurie,
lawrence, layla, leah, leandro, leanne, lee, leila, lena, leo, leon, leona, leonard, leonardo, leroy,
leslie, lester, leticia, levi, lewis, lex, liam, lila, lilian, lillian, lily, lincoln, linda, lindsay,
lindsey, linus, lionel, lisa, liz, lloyd, logan, lois, lola, lora, lorenzo, loretta, lori, lorraine, lottie,
lou, louis, louisa, louise, luca, lucas, lucia, lucian, lucille, lucinda, lucy, luis, luisa, luke, luna,
luther, lydia, lyle, lyn, lynda, lynn, lynne, mabel, mackenzie, macy, maddie, madeleine, madeline, madison,
mae, maggie, malcolm, malia, malik, mallory, mandy, manuel, mara, marc, marcel, marcella, marcia, marco,
marcos, marcus, margaret, margarita, margie, margot, maria, mariah, marian, marianne, marie, marilyn,
marina, mario, marion, marisa, marisol, marjorie, mark, marlene, marlon, marsha, marshall, martha, martin,
martina, marty, marvin, mary, mason, mateo, mathew, matilda, matt, matthew, maud, maureen, maurice, mavis,
max, maximus, maxine, maxwell, maya, megan, mel, melanie, melinda, melissa, melody, melvin, mercedes,
meredith, mia, micah, michael, michaela, michele, michelle, miguel, mike, mikhail, mila, mildred, miles,
millie, milo, milton, mina, mindy, minnie, mira, miranda, miriam, misty, mitchell, mohamed, mohammed, moira,
molly, mona, monica, monique, morgan, morris, moses, muhammad, muriel, murray, myra, myron, nadia, nadine,
naledi, nancy, naomi, natacha, natalia, natalie, natasha, nate, nathan, nathaniel, neal, ned, neil, nell,
nellie, nelson, nestor, nia, nicholas, nick, nico, nicola, nicolas, nicole, nigel, nikita, nikki, nikolai,
nina, noah, noel, noelle, nolan, nora, norah, noreen, norma, norman, octavia, octavio, odette, olaf, olga,
olive, oliver, olivia, ollie, omar, oona, opal, ophelia, oprah, ora, orlando, orson, orville, oscar,
osvaldo, oswald, otis, otto, owen, pablo, paige, pam, pamela, paola, paris, parker, pascal, pat, patience,
patricia, patrick, patsy, patti, patty, paul, paula, paulette, pauline, payton, pearl, pedro, peggy,
penelope, penny, percy, perry, pete, peter, petra, peyton, phil, philip, phillip, phoebe, phyllis, pierce,
pierre, polly, porter, preston, priscilla, priya, prudence, quentin, quincy, quinn, rachael, rachel, rafael,
ralph, ramon, ramona, randall, randolph, randy, raphael, raquel, raul, raven, ray, raymond, rebecca, reed,
reese, regina, reginald, rena, renata, rene, renee, rex, reyna, rhonda, ricardo, richard, rick, ricky,
riley, rita, rob, robbie, robert, roberta, roberto, robin, robyn, rochelle, rocky, rod, roderick, rodney,
rodrigo, rogelio, roger, roland, roman, ron, ronald, ronan, ronnie, rory, rosa, rosalie, rosalind, rosanna,
rose, rosemary, rosie, ross, rowan, rowena, roxanne, roy, ruben, ruby, rudolph, rudy, rufus, rupert,
russell, ruth, ryan, sabrina, sadie, sally, salma, salvador, sam, samantha, sammy, samson, samuel, sandra,
sandy, sara, sarah, sasha, saul, savannah, sawyer, scarlett, scott, sean, sebastian, selena, selma, serena,
sergei, sergio, seth, shane, shannon, shari, sharon, shaun, shauna, shawn, sheila, shelby, sheldon, shelley,
shelly, sherri, sherry, sheryl, shirley, sidney, sienna, sierra, silas, silvia, simon, simone, skylar,
sofia, solomon, sonia, sonya, sophia, sophie, spencer, stacey, stacy, stan, stanley, stefan, stella,
stephanie, stephen, steve, steven, stewart, stuart, sue, summer, susan, susanna, susie, suzanne, sybil,
sydney, sylvester, sylvia, tabitha, tamara, tammy, tanner, tanya, tara, tasha, tatiana, taylor, ted,
terence, teresa, teri, terrance, terrence, terri, terry, tess, tessa, thaddeus, thea, thelma, theo,
theodora, theodore, theresa, thomas, tia, tiana, tiffany, tim, timothy, tina, toby, todd, tom, tomas, tommy,
toni, tony, tonya, tracey, traci, tracy, travis, trent, trevor, tricia, trina, trinity, tristan, troy,
trudy, tucker, tyler, tyrone, tyson, uma, ursula, valentina, valerie, vanessa, vera, verna, vernon,
veronica, vicki, vicky, victor, victoria, vincent, viola, violet, virgil, virginia, vivian, vladimir, wade,
wallace, wally, walt, walter, wanda, warren, wayne, wendell, wendi, wendy, wes, wesley, whitney, wilbert,
wilbur, wilfred, will, willa, willard, william, willie, willis, willow, wilma, wilson, winifred, winnie,
winona, winston, winter, wolfgang, woodrow, wyatt, wynona, xander, xavier, yasmin, yolanda, yvette, yvonne,
zachary, zack, zane, zara, zeke, zelda, zoe, zoey
"""
